/* Torch's DLPack as ROCm's torch has it: device type 10 where CUDA's says 2. For `torch_as_rocm.py`. */
#include <stdint.h>
#define API __attribute__((visibility("default")))

enum { CUDA = 2, ROCM = 10 };
struct tensor { /* the beginning of DLTensor */
    void *data;
    int32_t device_type, device_id;
};
struct table { /* DLPackExchangeAPI */
    uint32_t major, minor;
    void *previous, *allocate, *from_object, *to_object;
    int (*view)(void *object, struct tensor *tensor);
    int (*current_stream)(int device_type, int32_t device_id, void **stream);
};
static struct table theirs;

static int view(void *object, struct tensor *tensor) {
    int error = theirs.view(object, tensor);
    if (!error && tensor->device_type == CUDA) tensor->device_type = ROCM;
    return error;
}

static int current_stream(int device_type, int32_t device_id, void **stream) {
    return theirs.current_stream(device_type == ROCM ? CUDA : device_type, device_id, stream);
}

API const struct table *as_rocm(const struct table *torch) {
    static struct table ours;
    theirs = ours = *torch;
    ours.view = view;
    ours.current_stream = current_stream;
    return &ours;
}
