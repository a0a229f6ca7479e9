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
