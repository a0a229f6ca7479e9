/* The same requests as benchmarks/verbs.py posts, from C: what the fake provider itself costs. */
#include "abi.h"

#include <string.h>

typedef int (*post_send)(struct ibv_qp *, struct ibv_send_wr *, struct ibv_send_wr **);
typedef int (*poll_cq)(struct ibv_cq *, int, struct ibv_wc *);

/* Post chains of `length` inline WRITEs of 8 bytes and poll until each chain has ended; 0, or what went wrong. */
int drive(struct ibv_qp *pair, uint64_t here, uint64_t there, uint32_t key, int length, int chains)
{
    post_send post = (post_send)pair->context->ops[POST_SEND];
    poll_cq poll = (poll_cq)pair->context->ops[POLL_CQ];
    struct ibv_send_wr request[length], *bad;
    struct ibv_sge part = {.addr = here, .length = 8};
    struct ibv_wc done[16];
    memset(request, 0, sizeof request);
    for (int i = 0; i < length; i++) {
        request[i].next = i + 1 < length ? &request[i + 1] : NULL;
        request[i].sg_list = &part;
        request[i].num_sge = 1;
        request[i].send_flags = INLINE | (i + 1 < length ? 0 : SIGNALED);
        request[i].rdma.remote_addr = there;
        request[i].rdma.rkey = key;
    }
    for (int chain = 0; chain < chains; chain++) {
        int error = post(pair, request, &bad), count;
        if (error)
            return error;
        while ((count = poll(pair->send_cq, 16, done)) == 0)
            ;
        if (count != 1 || done[0].status)
            return -1;
    }
    return 0;
}
