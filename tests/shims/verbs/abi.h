/* The parts of libibverbs' ABI that the fake provider has, declared here so that no header of rdma-core is needed. */
#pragma once

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

enum { POLL_CQ = 11, REQ_NOTIFY_CQ = 12, POST_SEND = 25, POST_RECV = 26, OPERATIONS = 32 };

enum { WRITE = 0, SEND = 2, READ = 4, SIGNALED = 2, INLINE = 8 };

enum { SENT = 0, WRITTEN = 1, HAS_READ = 2, RECEIVED = 128 }; /* opcodes of completions */

enum { RESET = 0, READY = 3, ERROR = 6 };

enum { SUCCESS = 0, LOC_PROT_ERR = 4, WR_FLUSH_ERR = 5, REM_ACCESS_ERR = 10, RETRY_EXC_ERR = 12 };

enum { CQ_ERR = 0, QP_FATAL = 1, PATH_MIG_ERR = 7 }; /* the latter two: the first and the last event of queue pairs */

struct ibv_context {
    void *device;
    void *ops[OPERATIONS];
    int cmd_fd, async_fd, num_comp_vectors;
    pthread_mutex_t mutex;
    void *abi_compat;
};

struct ibv_comp_channel {
    struct ibv_context *context;
    int fd, refcnt;
};

struct ibv_cq {
    struct ibv_context *context;
    struct ibv_comp_channel *channel;
    void *cq_context;
    uint32_t handle;
    int cqe;
};

struct ibv_qp {
    struct ibv_context *context;
    void *qp_context, *pd;
    struct ibv_cq *send_cq, *recv_cq;
    void *srq;
    uint32_t handle, qp_num, state, qp_type;
};

struct ibv_sge {
    uint64_t addr;
    uint32_t length, lkey;
};

struct ibv_send_wr {
    uint64_t wr_id;
    struct ibv_send_wr *next;
    struct ibv_sge *sg_list;
    int num_sge;
    uint32_t opcode, send_flags, imm_data;
    struct {
        uint64_t remote_addr;
        uint32_t rkey;
        uint64_t rest[2];
    } rdma;
    uint32_t remote_srqn;
    uint64_t rest[6];
};

struct ibv_recv_wr {
    uint64_t wr_id;
    struct ibv_recv_wr *next;
    struct ibv_sge *sg_list;
    int num_sge;
};

struct ibv_wc {
    uint64_t wr_id;
    uint32_t status, opcode, vendor_err, byte_len, imm_data, qp_num, src_qp, wc_flags;
    uint16_t pkey_index, slid;
    uint8_t sl, dlid_path_bits;
};

struct ibv_async_event {
    union {
        struct ibv_cq *cq;
        struct ibv_qp *qp;
        int port_num;
    } element;
    uint32_t event_type;
};

_Static_assert(sizeof(struct ibv_send_wr) == 128, "struct ibv_send_wr");
_Static_assert(sizeof(struct ibv_recv_wr) == 32, "struct ibv_recv_wr");
_Static_assert(sizeof(struct ibv_wc) == 48, "struct ibv_wc");
