/* TCP without any library: what benchmarks/hosts.py compares with. Each function returns 0, or -1 after an error. */

#include <errno.h>
#include <stddef.h>
#include <sys/socket.h>

/* Send or receive `size` bytes in calls of at most `most` bytes; with `poll` without ever sleeping. */
static int move(int receives, int fd, char *at, size_t size, size_t most, int poll)
{
    const int flags = poll ? MSG_DONTWAIT : 0;
    while (size > 0) {
        const size_t part = size < most ? size : most;
        const ssize_t done = receives ? recv(fd, at, part, flags) : send(fd, at, part, flags | MSG_NOSIGNAL);
        if (done > 0) {
            at += done;
            size -= (size_t)done;
        } else if (done == 0 || (errno != EAGAIN && errno != EINTR)) {
            return -1;
        }
    }
    return 0;
}

int send_all(int fd, char *from, size_t size, size_t most, int poll) { return move(0, fd, from, size, most, poll); }

int receive_all(int fd, char *into, size_t size, size_t most, int poll) { return move(1, fd, into, size, most, poll); }

/* A round trip from the side that begins. */
int there(int fd, char *from, char *into, size_t size, size_t most, int poll)
{
    return send_all(fd, from, size, most, poll) || receive_all(fd, into, size, most, poll) ? -1 : 0;
}

/* A round trip from the other side, which sends back what it has received. */
int back(int fd, char *from, char *into, size_t size, size_t most, int poll)
{
    (void)from;
    return receive_all(fd, into, size, most, poll) || send_all(fd, into, size, most, poll) ? -1 : 0;
}

/* Send `size` bytes and receive as many at the same time, without ever sleeping. With `room`, of `most` bytes, what comes is added
 * to the numbers of `into`, as soon as `most` bytes of it are there. */
static int exchange(int fd, const char *from, char *into, size_t size, char *room, size_t most)
{
    size_t sent = 0, got = 0;
    while (sent < size || got < size) {
        const size_t filled = got % most;
        size_t part = room ? most - filled : size;
        part = part < size - got ? part : size - got;
        ssize_t done = part ? recv(fd, room ? room + filled : into + got, part, MSG_DONTWAIT) : -2;
        if (done == 0 || (done == -1 && errno != EAGAIN && errno != EINTR))
            return -1;
        if (done > 0) {
            got += (size_t)done;
            if (room && (got % most == 0 || got == size)) {
                const size_t begin = (got - 1) / most * most, count = (got - begin) / sizeof(float);
                float *sum = (float *)(into + begin);
                for (size_t i = 0; i < count; i++)
                    sum[i] += ((const float *)room)[i];
            }
        }
        done = sent < size ? send(fd, from + sent, size - sent, MSG_DONTWAIT | MSG_NOSIGNAL) : 0;
        if (done == -1 && errno != EAGAIN && errno != EINTR)
            return -1;
        sent += done > 0 ? (size_t)done : 0;
    }
    return 0;
}

/* The sum of both sides' float32 numbers: each adds one half of them, then the sums are exchanged. `room` has `most` bytes. */
int all_reduce(int fd, char *at, char *room, size_t size, size_t most, int rank)
{
    const size_t half = size / 2;
    char *const mine = at + (rank ? half : 0), *const other = at + (rank ? 0 : half);
    return exchange(fd, other, mine, half, room, most) || exchange(fd, mine, other, half, NULL, most) ? -1 : 0;
}
