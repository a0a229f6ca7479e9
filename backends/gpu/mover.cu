// The movers of GPUs: copy array <-> ring, reduce as data comes out of a ring, reduce and scale in device memory.
//
// One source for NVRTC, hipRTC and plain C++ (tests run it on host memory, each block a thread: blockDim.x is 1).
// What goes before it, see `_kernels.source`: the constants XV_* of the ring, the codes of dtypes and operations.
// Compilers must not fuse products into sums: results are the host's to the bit.
//
// A block moves one lane of one transfer at a time. Its first warp watches: it looks at the other end's counter, says
// how many pieces may be copied, and publishes those that were. The other warps copy, each as fast as it can, so that
// nothing drains between pieces. A block of one warp does both in turns.

#if defined(__HIP__) || defined(__HIP_PLATFORM_AMD__) || defined(__HIPCC_RTC__)
#define XV_HIP 1
#elif defined(__CUDACC__)
#define XV_CUDA 1
#else
#include <sched.h>
#include <time.h>
#endif

namespace xv {

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

struct alignas(16) Word {
    u32 part[4];
};

// ---------------------------------------------------------------------------------------------- compilers' primitives
// load_acquire, load, store: a word that the other end sees too; the last two order nothing.
// fence_system: what this block did is seen everywhere before what this thread does next.
// load_ring: 16 bytes that the other end wrote, past caches that might hold older ones.
// hand_over: a warp's accesses are done before another warp of the block hears of it.
// add: to a word that the blocks of a launch share; gives what it was.
// agree, tell, pass: whether something holds in a whole warp; one of its lanes' value for all; each the value of a lane.

#if XV_HIP

#define XV_DEVICE __device__ __forceinline__
#define XV_APART __device__ __attribute__((noinline))
#define XV_UNROLL _Pragma("unroll")
#pragma clang fp contract(off)
#if defined(__GFX10__) || defined(__GFX11__) || defined(__GFX12__)
constexpr u32 WIDTH = 32;
#else
constexpr u32 WIDTH = 64;
#endif
typedef u32 Vector __attribute__((ext_vector_type(4)));

XV_DEVICE u64 load_acquire(const u64* p) { return __hip_atomic_load(p, __ATOMIC_ACQUIRE, __HIP_MEMORY_SCOPE_SYSTEM); }
XV_DEVICE u64 load(const u64* p) { return __hip_atomic_load(p, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
XV_DEVICE void store(u64* p, u64 v) { __hip_atomic_store(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_SYSTEM); }
XV_DEVICE void fence_system() { __builtin_amdgcn_fence(__ATOMIC_SEQ_CST, ""); }
XV_DEVICE void fence_block() { __builtin_amdgcn_fence(__ATOMIC_ACQ_REL, "workgroup"); }
// A wave's release waits for its own stores only, so each wave that wrote the ring makes its own.
XV_DEVICE void hand_over() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "");
    __builtin_amdgcn_wave_barrier();
}
XV_DEVICE u32 add(u32* p, u32 v) { return __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT); }
XV_DEVICE Word load_ring(const Word* p) {
    const Vector v = __builtin_nontemporal_load(reinterpret_cast<const Vector*>(p));
    return Word{{v.x, v.y, v.z, v.w}};
}
XV_DEVICE u32 pass(u32 value, u32 lane) {
    return static_cast<u32>(__builtin_amdgcn_ds_bpermute(static_cast<int>(4 * lane), static_cast<int>(value)));
}
XV_DEVICE bool agree(bool holds) {
    u32 votes = holds ? 1u : 0u;
    for (u32 step = WIDTH / 2; step; step /= 2) votes &= pass(votes, (threadIdx.x % WIDTH) ^ step);
    return votes;
}
XV_DEVICE u64 tell(u64 value, int lane) {
    const u32 low = static_cast<u32>(__builtin_amdgcn_readlane(static_cast<int>(value), lane));
    const u32 high = static_cast<u32>(__builtin_amdgcn_readlane(static_cast<int>(value >> 32), lane));
    return static_cast<u64>(high) << 32 | low;
}
XV_DEVICE void pause() { __builtin_amdgcn_s_sleep(1); }
XV_DEVICE void rest() { __builtin_amdgcn_s_sleep(16); }
XV_DEVICE float widen_half(u16 bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }
XV_DEVICE u16 round_half(float value) { return __builtin_bit_cast(u16, static_cast<_Float16>(value)); }

#elif XV_CUDA

#define XV_DEVICE __device__ __forceinline__
#define XV_APART __device__ __noinline__
#define XV_UNROLL _Pragma("unroll")
constexpr u32 WIDTH = 32;

XV_DEVICE u64 load_acquire(const u64* p) {
    u64 v;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
XV_DEVICE u64 load(const u64* p) {
    u64 v;
    asm volatile("ld.relaxed.sys.global.u64 %0, [%1];" : "=l"(v) : "l"(p) : "memory");
    return v;
}
XV_DEVICE void store(u64* p, u64 v) { asm volatile("st.relaxed.sys.global.u64 [%0], %1;" ::"l"(p), "l"(v) : "memory"); }
XV_DEVICE void fence_system() { asm volatile("fence.acq_rel.sys;" ::: "memory"); }
XV_DEVICE void fence_block() { __threadfence_block(); }
XV_DEVICE void hand_over() {
    __threadfence_block();
    __syncwarp();
}
XV_DEVICE u32 add(u32* p, u32 v) { return atomicAdd(p, v); }
XV_DEVICE Word load_ring(const Word* p) {
    Word w;
    asm volatile("ld.relaxed.sys.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(w.part[0]), "=r"(w.part[1]), "=r"(w.part[2]), "=r"(w.part[3])
                 : "l"(p)
                 : "memory");
    return w;
}
XV_DEVICE bool agree(bool holds) { return __all_sync(0xFFFFFFFFu, holds); }
XV_DEVICE u64 tell(u64 value, int lane) { return __shfl_sync(0xFFFFFFFFu, value, lane); }
XV_DEVICE u32 pass(u32 value, u32 lane) { return __shfl_sync(0xFFFFFFFFu, value, lane); }
XV_DEVICE void pause() { __nanosleep(32); }
XV_DEVICE void rest() { __nanosleep(500); }
XV_DEVICE float widen_half(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}
XV_DEVICE u16 round_half(float value) {
    u16 bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

#else

#define XV_DEVICE inline
#define XV_APART static __attribute__((noinline))
#define XV_UNROLL
constexpr u32 WIDTH = 1;

XV_DEVICE u64 load_acquire(const u64* p) { return __atomic_load_n(p, __ATOMIC_ACQUIRE); }
XV_DEVICE u64 load(const u64* p) { return __atomic_load_n(p, __ATOMIC_RELAXED); }
XV_DEVICE void store(u64* p, u64 v) { __atomic_store_n(p, v, __ATOMIC_RELEASE); }
XV_DEVICE void fence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }
XV_DEVICE void fence_block() {}
XV_DEVICE void hand_over() {}
XV_DEVICE u32 add(u32* p, u32 v) { return __atomic_fetch_add(p, v, __ATOMIC_ACQ_REL); }
XV_DEVICE Word load_ring(const Word* p) { return *p; }
XV_DEVICE bool agree(bool holds) { return holds; }
XV_DEVICE u32 pass(u32 value, u32) { return value; }
XV_DEVICE void pause() { sched_yield(); }
XV_DEVICE void rest() {  // blocks are threads here, and there are more of them than cores
    const timespec fifty_microseconds{0, 50000};
    nanosleep(&fifty_microseconds, nullptr);
}
XV_DEVICE float widen_half(u16 bits) { return static_cast<float>(__builtin_bit_cast(_Float16, bits)); }
XV_DEVICE u16 round_half(float value) { return __builtin_bit_cast(u16, static_cast<_Float16>(value)); }

#endif

// ------------------------------------------------------------------------------------------------------ element types
// The same bits as backends/host/codecs.py and reducers.py, which has the reasons.

template <class To, class From>
XV_DEVICE To as(From from) {
    static_assert(sizeof(To) == sizeof(From), "as many bits");
    union {
        From from;
        To to;
    } both = {from};
    return both.to;
}

template <class F>
struct Complex {
    F real, imag;
};

template <class T>
struct Bits;
template <>
struct Bits<float> {
    typedef u32 type;
    static constexpr u32 quiet = 0x400000u, invalid = 0xFFC00000u;
};
template <>
struct Bits<double> {
    typedef u64 type;
    static constexpr u64 quiet = 0x8000000000000ull, invalid = 0xFFF8000000000000ull;
};

// Vendors differ in which NaN an operation gives; every rank must get the same: x86's, the left operand's first.
template <class F>
XV_DEVICE F settle(F result, F a, F b) {
    typedef typename Bits<F>::type U;
    if (result == result) return result;
    if (a != a) return as<F>(as<U>(a) | Bits<F>::quiet);
    if (b != b) return as<F>(as<U>(b) | Bits<F>::quiet);
    return as<F>(Bits<F>::invalid);
}

template <class T>
XV_DEVICE T plus(T a, T b) {
    return static_cast<T>(static_cast<u64>(a) + static_cast<u64>(b));
}
XV_DEVICE float plus(float a, float b) { return settle(a + b, a, b); }
XV_DEVICE double plus(double a, double b) { return settle(a + b, a, b); }
template <class F>
XV_DEVICE Complex<F> plus(Complex<F> a, Complex<F> b) {
    return {plus(a.real, b.real), plus(a.imag, b.imag)};
}

template <class T>
XV_DEVICE T times(T a, T b) {
    return static_cast<T>(static_cast<u64>(a) * static_cast<u64>(b));
}
XV_DEVICE float times(float a, float b) { return settle(a * b, a, b); }
XV_DEVICE double times(double a, double b) { return settle(a * b, a, b); }
template <class F>
XV_DEVICE Complex<F> times(Complex<F> a, Complex<F> b) {
    return {a.real * b.real - a.imag * b.imag, a.real * b.imag + a.imag * b.real};
}

// Any float8 less its special values: multiplying by a power of two moves the exponent, and makes subnormals right.
template <u32 MANTISSA, u32 BIAS>
XV_DEVICE float widen8(u8 bits) {
    const float value = as<float>((bits & 0x7Fu) << (23 - MANTISSA)) * as<float>((254 - BIAS) << 23);
    return as<float>(as<u32>(value) | (bits & 0x80u) << 24);
}

// Magnitude code of any float8 by rounding; may exceed the largest code.
template <u32 MANTISSA, u32 BIAS>
XV_DEVICE u32 round8(float value) {
    u32 u = as<u32>(value) & 0x7FFFFFFFu;
    if (u < (127 + 1 - BIAS) << 23) {
        // Adding a number whose last bit is worth the smallest subnormal rounds to it.
        const u32 magic = (127 + 24 - BIAS - MANTISSA) << 23;
        return as<u32>(as<float>(u) + as<float>(magic)) - magic;
    }
    u += ((1u << (22 - MANTISSA)) - 1) + (u >> (23 - MANTISSA) & 1u);
    return (u >> (23 - MANTISSA)) - ((127 - BIAS) << MANTISSA);
}

XV_DEVICE bool is_nan(float value) { return (as<u32>(value) & 0x7FFFFFFFu) > 0x7F800000u; }
XV_DEVICE u32 sign8(float value) { return as<u32>(value) >> 24 & 0x80u; }
// The fnuz dialects: one NaN (0x80) for all that does not fit, no negative zero.
XV_DEVICE u8 fnuz(u32 code, float value) {
    if (code > 0x7Fu) return 0x80u;
    return static_cast<u8>(code ? code | sign8(value) : 0u);
}

// How an element lies in memory (Item) and what is reckoned with (Wide).
template <class T>
struct Plain {
    typedef T Item;
    typedef T Wide;
    static XV_DEVICE T load(T item) { return item; }
    static XV_DEVICE T save(T value) { return value; }
};
template <class T>
struct Low {
    typedef T Item;
    typedef float Wide;
};

template <int DTYPE>
struct Element;
template <> struct Element<XV_float64> : Plain<double> {};
template <> struct Element<XV_float32> : Plain<float> {};
template <> struct Element<XV_int8> : Plain<signed char> {};
template <> struct Element<XV_int16> : Plain<short> {};
template <> struct Element<XV_int32> : Plain<int> {};
template <> struct Element<XV_int64> : Plain<i64> {};
template <> struct Element<XV_uint8> : Plain<u8> {};
template <> struct Element<XV_uint16> : Plain<u16> {};
template <> struct Element<XV_uint32> : Plain<u32> {};
template <> struct Element<XV_uint64> : Plain<u64> {};
template <> struct Element<XV_bool> : Plain<u8> {};
template <> struct Element<XV_complex64> : Plain<Complex<float>> {};
template <> struct Element<XV_complex128> : Plain<Complex<double>> {};
template <>
struct Element<XV_float16> : Low<u16> {
    static XV_DEVICE float load(u16 item) {
        const u32 nan = (item & 0x8000u) << 16 | 0x7FC00000u | (item & 0x3FFu) << 13;
        return (item & 0x7FFFu) > 0x7C00u ? as<float>(nan) : widen_half(item);
    }
    static XV_DEVICE u16 save(float value) {
        const u32 u = as<u32>(value);
        return is_nan(value) ? static_cast<u16>((u >> 16 & 0x8000u) | 0x7E00u | (u >> 13 & 0x3FFu)) : round_half(value);
    }
};
template <>
struct Element<XV_bfloat16> : Low<u16> {
    static XV_DEVICE float load(u16 item) { return as<float>(static_cast<u32>(item) << 16); }
    static XV_DEVICE u16 save(float value) {
        const u32 u = as<u32>(value);
        return static_cast<u16>(is_nan(value) ? u >> 16 | 0x40u : (u + 0x7FFFu + (u >> 16 & 1u)) >> 16);
    }
};
template <>
struct Element<XV_float8_e4m3fn> : Low<u8> {
    static XV_DEVICE float load(u8 item) {
        return (item & 0x7Fu) == 0x7Fu ? as<float>(0x7FC00000u) : widen8<3, 7>(item);
    }
    static XV_DEVICE u8 save(float value) {
        const u32 code = round8<3, 7>(value);
        return static_cast<u8>((code < 0x7Fu ? code : 0x7Fu) | sign8(value));
    }
};
template <>
struct Element<XV_float8_e4m3fnuz> : Low<u8> {
    static XV_DEVICE float load(u8 item) { return item == 0x80u ? as<float>(0x7FC00000u) : widen8<3, 8>(item); }
    static XV_DEVICE u8 save(float value) { return fnuz(round8<3, 8>(value), value); }
};
template <>
struct Element<XV_float8_e5m2> : Low<u8> {
    static XV_DEVICE float load(u8 item) { return Element<XV_float16>::load(static_cast<u16>(item << 8)); }
    static XV_DEVICE u8 save(float value) {
        const u32 code = round8<2, 15>(value);
        return static_cast<u8>((is_nan(value) ? 0x7Eu : code < 0x7Cu ? code : 0x7Cu) | sign8(value));
    }
};
template <>
struct Element<XV_float8_e5m2fnuz> : Low<u8> {
    static XV_DEVICE float load(u8 item) { return item == 0x80u ? as<float>(0x7FC00000u) : widen8<2, 16>(item); }
    static XV_DEVICE u8 save(float value) { return fnuz(round8<2, 16>(value), value); }
};

template <int OP>
struct Combine;
template <> struct Combine<XV_SUM> {
    template <class T> static XV_DEVICE T of(T a, T b) { return plus(a, b); }
};
template <> struct Combine<XV_PROD> {
    template <class T> static XV_DEVICE T of(T a, T b) { return times(a, b); }
};
template <> struct Combine<XV_MIN> {
    template <class T> static XV_DEVICE T of(T a, T b) { return a < b || a != a ? a : b; }
};
template <> struct Combine<XV_MAX> {
    template <class T> static XV_DEVICE T of(T a, T b) { return a > b || a != a ? a : b; }
};
template <> struct Combine<XV_BAND> {
    template <class T> static XV_DEVICE T of(T a, T b) { return a & b; }
};
template <> struct Combine<XV_BOR> {
    template <class T> static XV_DEVICE T of(T a, T b) { return a | b; }
};
template <> struct Combine<XV_BXOR> {
    template <class T> static XV_DEVICE T of(T a, T b) { return a ^ b; }
};

// bool is stored as 0 or 1 in a byte: sum and max are "any", prod and min are "all".
template <int DTYPE, int OP>
struct Operation : Combine<OP> {};
template <> struct Operation<XV_bool, XV_SUM> : Combine<XV_BOR> {};
template <> struct Operation<XV_bool, XV_MAX> : Combine<XV_BOR> {};
template <> struct Operation<XV_bool, XV_PROD> : Combine<XV_BAND> {};
template <> struct Operation<XV_bool, XV_MIN> : Combine<XV_BAND> {};

template <class T>
XV_DEVICE T quotient(T value, i64 divisor) {
    return static_cast<T>(value / divisor);  // towards zero, as NCCL divides
}
XV_DEVICE u64 quotient(u64 value, i64 divisor) { return value / static_cast<u64>(divisor); }
XV_DEVICE float quotient(float value, i64 divisor) {
    const float by = static_cast<float>(divisor);
    return settle(value / by, value, by);
}
XV_DEVICE double quotient(double value, i64 divisor) {
    const double by = static_cast<double>(divisor);
    return settle(value / by, value, by);
}
template <class F>
XV_DEVICE Complex<F> quotient(Complex<F> value, i64 divisor) {
    return {quotient(value.real, divisor), quotient(value.imag, divisor)};
}
template <class T>
XV_DEVICE T scaled(T value, double factor) {
    return times(value, static_cast<T>(factor));
}
template <class F>
XV_DEVICE Complex<F> scaled(Complex<F> value, double factor) {
    return {scaled(value.real, factor), scaled(value.imag, factor)};
}

// ------------------------------------------------------------------------------------------------- sixteen bytes at once

// A word seen as elements.
template <class Item>
union Pack {
    static constexpr u32 COUNT = sizeof(Word) / sizeof(Item);
    Word word;
    Item items[COUNT];
};

XV_DEVICE bool is_aligned(const void* place) { return reinterpret_cast<u64>(place) % sizeof(Word) == 0; }

// The bytes of a word from `low` up to `high`: of an array's ends, whose neighbours are not ours.
XV_DEVICE Word gather(const char* from, u32 low, u32 high) {
    Pack<u8> pack = {Word{{0, 0, 0, 0}}};
    XV_UNROLL
    for (u32 i = 0; i < sizeof(Word); ++i)
        if (i >= low && i < high) pack.items[i] = static_cast<u8>(from[i]);
    return pack.word;
}
XV_DEVICE void scatter(char* to, Word word, u32 low, u32 high) {
    const Pack<u8> pack = {word};
    XV_UNROLL
    for (u32 i = 0; i < sizeof(Word); ++i)
        if (i >= low && i < high) to[i] = static_cast<char>(pack.items[i]);
}
// The same at an aligned place, at once where all of the word is meant.
XV_DEVICE Word fetch(const char* from, u32 low, u32 high) {
    return high - low == sizeof(Word) ? *reinterpret_cast<const Word*>(from) : gather(from, low, high);
}
XV_DEVICE void deliver(char* to, Word word, u32 low, u32 high) {
    if (high - low == sizeof(Word)) *reinterpret_cast<Word*>(to) = word;
    else scatter(to, word, low, high);
}

// Sixteen bytes out of two words that follow each other, from byte `skip` of the first, 0 < skip < 16.
XV_DEVICE Word join(Word first, Word second, u32 skip) {
    u32 part[8];
    XV_UNROLL
    for (u32 i = 0; i < 4; ++i) part[i] = first.part[i], part[4 + i] = second.part[i];
    XV_UNROLL
    for (u32 i = 0; i < 6; ++i) part[i] = skip & 8 ? part[i + 2] : part[i];
    XV_UNROLL
    for (u32 i = 0; i < 5; ++i) part[i] = skip & 4 ? part[i + 1] : part[i];
    Word word;
    XV_UNROLL
    for (u32 i = 0; i < 4; ++i)
        word.part[i] = static_cast<u32>((static_cast<u64>(part[i + 1]) << 32 | part[i]) >> 8 * (skip & 3));
    return word;
}
XV_DEVICE Word pass(Word word, u32 lane) {
    XV_UNROLL
    for (u32 i = 0; i < 4; ++i) word.part[i] = pass(word.part[i], lane);
    return word;
}

template <int DTYPE, int OP>
XV_DEVICE Word combine_items(Word left, Word right) {
    typedef Element<DTYPE> E;
    typedef Pack<typename E::Item> Items;
    Items a = {left}, b = {right};
    XV_UNROLL
    for (u32 i = 0; i < Items::COUNT; ++i)
        a.items[i] = E::save(Operation<DTYPE, OP>::of(E::load(a.items[i]), E::load(b.items[i])));
    return a.word;
}

// A kernel knows every reduction: one that was loaded only when it is needed would wait for those that run, which may
// wait for it. `XV_REDUCTIONS(X)` is X(dtype, operation) for each there is; `code_of` tells them apart.
#define XV_ORDERED(X, D) X(D, SUM) X(D, PROD) X(D, MIN) X(D, MAX)
#define XV_BITS(X, D) XV_ORDERED(X, D) X(D, BAND) X(D, BOR) X(D, BXOR)
#define XV_REDUCTIONS(X)                                                                                  \
    XV_ORDERED(X, float64) XV_ORDERED(X, float32) XV_ORDERED(X, float16) XV_ORDERED(X, bfloat16)          \
    XV_ORDERED(X, float8_e4m3fn) XV_ORDERED(X, float8_e4m3fnuz) XV_ORDERED(X, float8_e5m2)                \
    XV_ORDERED(X, float8_e5m2fnuz) XV_BITS(X, int8) XV_BITS(X, int16) XV_BITS(X, int32) XV_BITS(X, int64) \
    XV_BITS(X, uint8) XV_BITS(X, uint16) XV_BITS(X, uint32) XV_BITS(X, uint64) XV_BITS(X, bool)           \
    X(complex64, SUM) X(complex64, PROD) X(complex128, SUM) X(complex128, PROD)
#define XV_NUMBERS(X)                                                                                            \
    X(float64) X(float32) X(float16) X(bfloat16) X(float8_e4m3fn) X(float8_e4m3fnuz) X(float8_e5m2)              \
    X(float8_e5m2fnuz) X(int8) X(int16) X(int32) X(int64) X(uint8) X(uint16) X(uint32) X(uint64) X(complex64)    \
    X(complex128)
XV_DEVICE constexpr u32 code_of(u32 dtype, u32 op) { return dtype * 16 + op; }
// Three bits for each dtype: a switch would cost the movers registers.
XV_DEVICE constexpr u64 log2_of(u64 size) { return (size > 1) + (size > 2) + (size > 4) + (size > 8); }
#define XV_CASE(D) | log2_of(sizeof(Element<XV_##D>::Item)) << 3 * XV_##D
constexpr u64 ITEM_SIZES = 0 XV_NUMBERS(XV_CASE);
#undef XV_CASE
XV_DEVICE u32 item_bytes(i64 dtype) { return 1u << (ITEM_SIZES >> 3 * dtype & 7); }

// The elements of two words reduced; out of line, because it is large.
XV_APART Word combine(Word left, Word right, u32 code) {
    switch (code) {
#define XV_CASE(D, O) case code_of(XV_##D, XV_##O): return combine_items<XV_##D, XV_##O>(left, right);
        XV_REDUCTIONS(XV_CASE)
#undef XV_CASE
    }
    return left;
}

// ---------------------------------------------------------------------------------------------------------- transfers

// What an end keeps in device memory from message to message. XV_STATE_BYTES of zeros are a fresh one.
struct Lane {
    u64 moved;  // pieces this end has moved since the start
    u64 seen;   // the other end's counter, when last looked at
};
struct State {
    u64 sequence;
    u64 consumed;
    u32 done;  // blocks of the running message
    u32 stopped;
    u64 compared;  // what came of comparing the descriptions of the newest message: see `compared`
    u64 padding[12];
    Lane lanes[XV_MAX_LANES];
};
static_assert(sizeof(State) == XV_STATE_BYTES, "as _kernels.py allocates it");

// One transfer; _kernels.py packs it.
struct Row {
    char* ring;
    char* slots_at;  // behind the ring's ledger, or in the memory of either end's GPU
    State* state;
    char* data;
    i64 apart;  // bytes from an element to the own one that it is reduced with; 0 if it is reduced in place
    i64 nbytes;
    i64 part;  // bytes of a lane
    i64 op, dtype, tag, detail;
    u32 peer;
    u32 producer, reduction, remote_first;  // the second as `code_of` has it, or 0
    u32 slots, slot_bytes, ledger;
    u32 put_warps;  // that write a large message to the ring
    u32 chunk, lanes;
    u32 block, blocks;  // the first block that works for it, and how many do
};
static_assert(sizeof(Row) == XV_ROW_BYTES, "as _kernels.py packs it");

struct Batch {
    Row rows[XV_ROWS];
};
static_assert(sizeof(Batch) <= 4096, "what a kernel takes at most as arguments");

enum Verdict : u32 { OPEN, EQUAL, DIFFERENT };

// What the warps of a block tell each other.
struct Shared {
    volatile u32 ready;  // pieces that may be copied
    volatile u32 copied[32];  // pieces that each copying warp is through with
    volatile u32 left;  // something went wrong, or the ring stopped
    volatile u32 verdict;  // of comparing both ends' descriptions
};

// A lane's part of a message, as one thread sees it.
struct Part {
    const Row& row;
    Shared& shared;
    u64 sequence;
    u64 start, seen;  // of the lane's counters, ours and theirs
    u64 *mine, *theirs;
    char *data, *slots;
    i64 nbytes;
    u32 pieces;
    u32 workers;  // copying warps
    bool leader;  // works for lane 0, which posts and answers for the whole message
};

// What a watching warp keeps in mind.
struct WatchState {
    u32 ready, published;
    u32 idle;  // looks since the last news
    Verdict verdict;
    bool warned;  // the ring has stopped
};
constexpr u32 PATIENCE = 1000;  // looks: a microsecond each over PCIe, a turn of the core on the host
constexpr u32 SELDOM = 32;  // looks from one at the abort word to the next

XV_DEVICE u64* word(const Row& row, i64 offset) { return reinterpret_cast<u64*>(row.ring + offset); }
XV_DEVICE u64* entry(const Row& row, u64 sequence, bool producer) {
    return word(row, row.ledger + static_cast<i64>(sequence % XV_LEDGER + (producer ? 0 : XV_LEDGER)) * XV_ENTRY);
}
XV_DEVICE u64 field(const Row& row, u32 number) {
    const i64 fields[5] = {row.op, row.dtype, row.nbytes, row.tag, row.detail};
    return static_cast<u64>(number == 0 ? fields[0] : number == 1 ? fields[1] : number == 2 ? fields[2]
                            : number == 3 ? fields[3] : fields[4]);
}
XV_DEVICE bool alone() { return blockDim.x <= WIDTH; }
XV_DEVICE bool watches() { return threadIdx.x < WIDTH; }
XV_DEVICE bool copies(const Part& p) {
    return alone() || (!watches() && threadIdx.x / WIDTH <= p.workers);
}
XV_DEVICE u32 worker() { return alone() ? 0 : threadIdx.x / WIDTH - 1; }
XV_DEVICE bool first_of_warp() { return threadIdx.x % WIDTH == 0; }

// Three words of the ring in one look of a warp: each would cost a microsecond over PCIe. Equal ones are read once.
struct Look {
    u64 first, second, third;
};
XV_DEVICE Look look(const u64* first, const u64* second, const u64* third) {
#if XV_CUDA || XV_HIP
    const u32 lane = threadIdx.x % WIDTH;
    const u64 seen = load_acquire(lane == 0 ? first : lane == 1 ? second : third);
    return {tell(seen, 0), tell(seen, 1), tell(seen, 2)};
#else
    const u64 one = load_acquire(first), two = load_acquire(second);
    return {one, two, load_acquire(third)};
#endif
}

// Write this end's description; its number makes it valid.
XV_DEVICE void write_entry(const Part& p) {
    u64* own = entry(p.row, p.sequence, p.row.producer);
    for (u32 i = threadIdx.x % WIDTH; i < 5; i += WIDTH) store(own + 1 + i, field(p.row, i));
    hand_over();
}

// The other end's description, which is there, against ours.
XV_DEVICE Verdict compare(const Part& p) {
    const u64* other = entry(p.row, p.sequence, !p.row.producer);
    bool equal = true;
    for (u32 i = threadIdx.x % WIDTH; i < 5; i += WIDTH) equal = equal && load(other + 1 + i) == field(p.row, i);
    return agree(equal) ? EQUAL : DIFFERENT;
}

// What the leader's last warp does first: the consumer posts its description, the producer looks whether the
// consumer's is there already, and whether the ring has stopped.
XV_DEVICE void begin(const Part& p) {
    u64* consumers = entry(p.row, p.sequence, false);
    if (!p.row.producer) {
        write_entry(p);
        if (first_of_warp()) {
            fence_system();
            store(consumers, p.sequence + 1);
        }
        return;
    }
    const Look found = look(consumers, word(p.row, XV_ABORT), consumers);
    if (found.second) p.shared.left = 1;
    if (found.first == p.sequence + 1 && compare(p) == DIFFERENT) {
        p.shared.verdict = DIFFERENT;
        p.shared.left = 1;
    }
}

// The ledger's place is free once the consumer is through with what lay there; asked of the ring once in a round.
XV_DEVICE bool await_place(const Part& p) {
    u64 consumed = p.row.state->consumed;
    for (u32 tries = 0; p.sequence - consumed >= XV_LEDGER; ++tries) {
        const u64* place = word(p.row, XV_CONSUMED);
        const Look found = look(place, word(p.row, XV_ABORT), place);
        consumed = found.first;
        if (first_of_warp()) p.row.state->consumed = consumed;
        if (p.sequence - consumed >= XV_LEDGER && (found.second || agree(p.shared.left))) return false;
        if (tries > PATIENCE) rest();
    }
    return true;
}

// Say that so many pieces are moved. The producer's description becomes valid with its first, in one fence.
XV_DEVICE void publish(const Part& p, u32 published) {
    if (!first_of_warp()) return;
    // What was read needs no fence: it has arrived, or it could not have been passed on.
    if (p.row.producer) fence_system();
    if (p.row.producer && p.leader && published <= 1) store(entry(p.row, p.sequence, true), p.sequence + 1);
    if (published) store(p.mine, p.start + published);
}

// How the leader tells the other blocks, in device memory, what came of comparing the descriptions; OPEN if it left before.
XV_DEVICE u64 compared(const Part& p, Verdict verdict) { return (p.sequence + 1) << 2 | verdict; }

// Look at what the other end has done. A GPU reads a line of host memory for one block at a time, a microsecond each: all
// blocks read their own lane's counters, but only the leader reads the other end's description, and the abort word is
// looked at seldom, by each in its turn.
XV_DEVICE void look_around(Part& p, WatchState& w) {
    Shared& shared = p.shared;
    const bool producer = p.row.producer, asks = (w.idle + blockIdx.x) % SELDOM == SELDOM - 1;
    u64* answer = &p.row.state->compared;
    const u64* description = p.leader ? entry(p.row, p.sequence, !producer) : answer;
    const Look found = look(p.theirs, asks ? word(p.row, XV_ABORT) : p.theirs, w.verdict == OPEN ? description : p.theirs);
    const u64 may = found.first - p.start + (producer ? p.row.slots : 0);
    const u32 ready = may < p.pieces ? static_cast<u32>(may) : p.pieces;
    const u64 described_as = p.leader ? found.third : found.third >> 2;
    const bool described = w.verdict == OPEN && described_as == p.sequence + 1;
    if (ready == w.ready && !described) {
        // What was published before a stop is still delivered, and may be younger than this look: look once more. Others
        // than the leader leave the comparison to it, which may come late.
        if (w.warned && (p.leader || w.verdict != OPEN)) {
            if (w.verdict == OPEN && first_of_warp()) store(answer, compared(p, OPEN));
            shared.left = 1;
        }
        w.warned = w.warned || (asks && found.second);
        if (++w.idle > PATIENCE || (WIDTH > 1 && w.ready)) rest();
        if (alone()) pause();
        return;
    }
    p.seen = found.first;
    w.ready = ready;
    w.idle = 0;
    // The copying warps fetch while the descriptions are compared, and wait before they deliver.
    if (first_of_warp() && !alone()) shared.ready = ready;
    if (described) {
        w.verdict = p.leader ? compare(p) : static_cast<Verdict>(found.third & 3);
        if (first_of_warp()) {
            if (p.leader) store(answer, compared(p, w.verdict));
            shared.verdict = w.verdict;
        }
        if (w.verdict != EQUAL) shared.left = 1;
    }
    if (first_of_warp() && w.verdict == EQUAL) shared.ready = ready;
}

// One round of the watching warp. False once all is published, or the block leaves.
XV_DEVICE bool watch(Part& p, WatchState& w) {
    if (agree(p.shared.left)) return false;
    bool through = w.published < p.pieces;
    for (u32 i = threadIdx.x % WIDTH; i < p.workers; i += WIDTH) through = through && p.shared.copied[i] > w.published;
    if (agree(through)) {
        fence_block();
        publish(p, ++w.published);
    }
    if (w.verdict == EQUAL && w.published == p.pieces) return false;
    // While there is more to copy than the piece that may be under way, there is no hurry.
    if (w.verdict == EQUAL && (w.ready == p.pieces || w.ready > w.published + 1)) {
        if (!alone() && p.pieces > 1) pause();
    } else {
        look_around(p, w);
    }
    return true;
}

// Whether a warp may deliver what it fetched and reduced; waits for the comparison, which takes as long as a fetch.
XV_DEVICE bool approved(const Shared& shared) {
    while (shared.verdict == OPEN && !shared.left)
        if (alone()) pause();
    return shared.verdict == EQUAL;  // settled before `left` is set, so that a warp's lanes agree
}

// A warp's share of a piece to be sent: runs of DEPTH words a thread, all on their way before the first is used.
XV_DEVICE void send(const Part& p, const char* data, Word* ring, u32 nbytes) {
    constexpr u32 DEPTH = 8, RUN = DEPTH * WIDTH, SIZE = sizeof(Word);
    const u32 whole = nbytes / SIZE, words = (nbytes + SIZE - 1) / SIZE;
    for (u32 at = worker() * RUN; at < words; at += p.workers * RUN) {
        const u32 first = at + threadIdx.x % WIDTH;
        if (at + RUN <= whole) {
            Word kept[DEPTH];
            XV_UNROLL
            for (u32 d = 0; d < DEPTH; ++d) kept[d] = *reinterpret_cast<const Word*>(data + (first + d * WIDTH) * SIZE);
            XV_UNROLL
            for (u32 d = 0; d < DEPTH; ++d) ring[first + d * WIDTH] = kept[d];
            continue;
        }
        for (u32 i = first; i < words; i += WIDTH) ring[i] = fetch(data + i * SIZE, 0, i < whole ? SIZE : nbytes % SIZE);
    }
}

// A warp's share of a piece that came: copied to the array, or reduced into it. False if it must not be delivered.
template <bool REDUCES>
XV_DEVICE bool receive(const Part& p, char* data, const Word* ring, u32 nbytes) {
    // What is reduced is on its way from both sides at once, in no more registers than a copy takes.
    constexpr u32 DEPTH = REDUCES ? 4 : 8, RUN = DEPTH * WIDTH, SIZE = sizeof(Word);
    const u32 whole = nbytes / SIZE, words = (nbytes + SIZE - 1) / SIZE, code = p.row.reduction;
    const bool swap = p.row.remote_first;
    for (u32 at = worker() * RUN; at < words; at += p.workers * RUN) {
        const u32 first = at + threadIdx.x % WIDTH;
        if (at + RUN <= whole) {
            Word* place = reinterpret_cast<Word*>(data) + first;
            const Word* own = reinterpret_cast<const Word*>(data + p.row.apart) + first;
            Word from[DEPTH], kept[DEPTH];
            XV_UNROLL
            for (u32 d = 0; d < DEPTH; ++d) from[d] = load_ring(ring + first + d * WIDTH);
            if (REDUCES) {
                XV_UNROLL
                for (u32 d = 0; d < DEPTH; ++d) kept[d] = own[d * WIDTH];
            }
            if (REDUCES) {
                XV_UNROLL
                for (u32 d = 0; d < DEPTH; ++d)
                    from[d] = swap ? combine(from[d], kept[d], code) : combine(kept[d], from[d], code);
            }
            if (!approved(p.shared)) return false;
            XV_UNROLL
            for (u32 d = 0; d < DEPTH; ++d) place[d * WIDTH] = from[d];
            continue;
        }
        for (u32 i = first; i < words; i += WIDTH) {
            char* place = data + i * SIZE;
            const u32 bytes = i < whole ? SIZE : nbytes % SIZE;
            Word from = load_ring(ring + i);
            if (REDUCES) {
                const Word kept = fetch(place + p.row.apart, 0, bytes);
                from = swap ? combine(from, kept, code) : combine(kept, from, code);
            }
            if (!approved(p.shared)) return false;
            deliver(place, from, 0, bytes);
        }
    }
    return true;
}

// The same where the array is not aligned: every access is, and words are made of two that follow each other. Of these
// a thread loads one and its neighbour the other, as the ring's would otherwise come over PCIe twice. Runs begin where
// the ring's do: over PCIe a warp's access that begins in the middle of a line costs a line more. What both ends of the
// array share with others is accessed by bytes.
struct Loose {
    u32 shift, end;  // bytes from the aligned place before the array to its beginning, and to its end
    XV_DEVICE u32 low(u32 word) const { return word ? 0 : shift; }
    XV_DEVICE u32 high(u32 word) const { return end - word * 16 < 16 ? end - word * 16 : 16; }
};
XV_DEVICE Loose loose(const char* data, u32 nbytes) {
    const u32 shift = reinterpret_cast<u64>(data) % sizeof(Word);
    return {shift, shift + nbytes};
}
XV_DEVICE void send_loose(const Part& p, const char* data, Word* ring, u32 nbytes) {
    constexpr u32 DEPTH = 4, RUN = DEPTH * WIDTH, SIZE = sizeof(Word);
    const Loose array = loose(data, nbytes);
    const char* base = data - array.shift;
    const u32 words = (nbytes + SIZE - 1) / SIZE, lane = threadIdx.x % WIDTH;
    for (u32 at = worker() * RUN; at < words; at += p.workers * RUN) {
        const u32 first = at + lane;
        if ((at + RUN + 1) * SIZE <= array.end) {
            const Word* from = reinterpret_cast<const Word*>(base) + first;
            Word kept[DEPTH], beyond = from[RUN - lane];
            kept[0] = fetch(base + first * SIZE, array.low(first), SIZE);
            XV_UNROLL
            for (u32 d = 1; d < DEPTH; ++d) kept[d] = from[d * WIDTH];
            XV_UNROLL
            for (u32 d = 0; d < DEPTH; ++d) {
                const Word next = pass(lane ? kept[d] : d + 1 < DEPTH ? kept[d + 1] : beyond, (lane + 1) % WIDTH);
                ring[first + d * WIDTH] = join(kept[d], next, array.shift);
            }
            continue;
        }
        for (u32 i = first; i < words && i < at + RUN; i += WIDTH) {
            Word next = {{0, 0, 0, 0}};
            if ((i + 1) * SIZE < array.end) next = fetch(base + (i + 1) * SIZE, 0, array.high(i + 1));
            ring[i] = join(fetch(base + i * SIZE, array.low(i), array.high(i)), next, array.shift);
        }
    }
}
template <bool REDUCES>
XV_DEVICE bool receive_loose(const Part& p, char* data, const Word* ring, u32 nbytes) {
    constexpr u32 DEPTH = REDUCES ? 2 : 8, RUN = DEPTH * WIDTH, SIZE = sizeof(Word);
    const Loose array = loose(data, nbytes);
    char* base = data - array.shift;
    const u32 words = (array.end + SIZE - 1) / SIZE, came = (nbytes + SIZE - 1) / SIZE, lane = threadIdx.x % WIDTH;
    const u32 skip = SIZE - array.shift, code = p.row.reduction;
    const bool swap = p.row.remote_first;
    for (u32 at = worker() * RUN; at < words; at += p.workers * RUN) {
        const u32 first = at + lane;
        if ((at + RUN) * SIZE <= array.end) {
            char* place = base + first * SIZE;
            const u32 low = array.low(first);
            Word from[DEPTH], kept[DEPTH], before = load_ring(ring + (at ? at - 1 : 0));
            XV_UNROLL
            for (u32 d = 0; d < DEPTH; ++d) from[d] = load_ring(ring + first + d * WIDTH);
            if (REDUCES) {
                XV_UNROLL
                for (u32 d = 0; d < DEPTH; ++d) kept[d] = fetch(place + p.row.apart + d * WIDTH * SIZE, d ? 0 : low, SIZE);
            }
            if (!approved(p.shared)) return false;
            XV_UNROLL
            for (u32 d = 0; d < DEPTH; ++d) {
                const Word last = pass(lane + 1 < WIDTH ? from[d] : d ? from[d - 1] : before, (lane + WIDTH - 1) % WIDTH);
                Word word = join(last, from[d], skip);
                if (REDUCES) word = swap ? combine(word, kept[d], code) : combine(kept[d], word, code);
                deliver(place + d * WIDTH * SIZE, word, d ? 0 : low, SIZE);
            }
            continue;
        }
        for (u32 i = first; i < words && i < at + RUN; i += WIDTH) {
            const u32 low = array.low(i), high = array.high(i);
            Word word = join(load_ring(ring + (i ? i - 1 : 0)), load_ring(ring + (i < came ? i : came - 1)), skip);
            if (REDUCES) {
                const Word kept = fetch(base + p.row.apart + i * SIZE, low, high);
                word = swap ? combine(word, kept, code) : combine(kept, word, code);
            }
            if (!approved(p.shared)) return false;
            deliver(base + i * SIZE, word, low, high);
        }
    }
    return true;
}

// Reduced where a word of memory may hold parts of two items, or where both operands are aligned differently.
XV_DEVICE bool receive_packed(const Part& p, char* data, const Word* ring, u32 nbytes) {
    constexpr u32 SIZE = sizeof(Word);
    const u32 code = p.row.reduction;
    for (u32 i = worker() * WIDTH + threadIdx.x % WIDTH; i * SIZE < nbytes; i += p.workers * WIDTH) {
        char* place = data + i * SIZE;
        const u32 bytes = nbytes - i * SIZE < SIZE ? nbytes - i * SIZE : SIZE;
        const Word from = load_ring(ring + i), kept = gather(place + p.row.apart, 0, bytes);
        const Word word = p.row.remote_first ? combine(from, kept, code) : combine(kept, from, code);
        if (!approved(p.shared)) return false;
        scatter(place, word, 0, bytes);
    }
    return true;
}
template <bool REDUCES>
XV_DEVICE bool receive_anyhow(const Part& p, char* data, const Word* ring, u32 nbytes) {
    const bool alike = !REDUCES || is_aligned(reinterpret_cast<const char*>(p.row.apart));
    if (alike && is_aligned(data)) return receive<REDUCES>(p, data, ring, nbytes);
    if (!alike || (REDUCES && reinterpret_cast<u64>(data) % item_bytes(p.row.dtype)))
        return receive_packed(p, data, ring, nbytes);
    return receive_loose<REDUCES>(p, data, ring, nbytes);
}

// One round of a copying warp: the next piece, if it may be copied. False once all are.
XV_DEVICE bool copy(const Part& p, u32& piece) {
    Shared& shared = p.shared;
    if (piece == p.pieces || agree(shared.left)) return false;
    if (!agree(shared.ready > piece)) {
        if (!alone()) pause();
        return true;
    }
    fence_block();
    const i64 offset = static_cast<i64>(piece) * p.row.chunk;
    const u32 nbytes = p.nbytes - offset < p.row.chunk ? static_cast<u32>(p.nbytes - offset) : p.row.chunk;
    char* data = p.data + offset;
    Word* ring = reinterpret_cast<Word*>(
        p.slots + static_cast<i64>((p.start + piece) % p.row.slots) * p.row.slot_bytes);
    bool approved = true;
    if (p.row.producer) {
        if (is_aligned(data)) send(p, data, ring, nbytes);
        else send_loose(p, data, ring, nbytes);
    } else {
        approved = p.row.reduction ? receive_anyhow<true>(p, data, ring, nbytes) : receive_anyhow<false>(p, data, ring, nbytes);
    }
    if (!agree(approved)) return false;  // lanes that had nothing to deliver did not ask
    hand_over();
    ++piece;
    if (first_of_warp()) shared.copied[worker()] = piece;
    return true;
}

// A lane's part of a message, and what the block's threads need to know of each other.
XV_DEVICE Part part_of(const Row& row, Shared& shared, u32 lane) {
    const State& state = *row.state;
    const Lane counts = state.lanes[lane];
    const u64 sequence = state.sequence;
    const bool producer = row.producer, stopped = state.stopped;
    const i64 low = lane * row.part, high = low + row.part < row.nbytes ? low + row.part : row.nbytes;
    const i64 nbytes = high > low ? high - low : 0;
    const u32 pieces = static_cast<u32>((nbytes + row.chunk - 1) / row.chunk);
    const u32 others = alone() ? 1 : blockDim.x / WIDTH - 1;
    // The producer's last warp reads the other end's description over PCIe: nothing is published later because of it.
    const u32 warps = producer && lane == 0 && others > 1 ? others - 1 : others;
    const bool few = producer && pieces > 4 && warps > row.put_warps && is_aligned(row.data);
    u64* head = word(row, XV_COUNTERS + 2 * static_cast<i64>(lane) * XV_LINE);
    u64* tail = head + XV_LINE / sizeof(u64);
    if (threadIdx.x < sizeof(shared.copied) / sizeof(u32)) shared.copied[threadIdx.x] = 0;
    if (threadIdx.x == 0) {
        const u64 free = counts.seen + row.slots - counts.moved;
        shared.ready = !producer ? 0 : free < pieces ? static_cast<u32>(free) : pieces;
        shared.verdict = producer ? EQUAL : OPEN;
        shared.left = stopped;
    }
    char* slots = row.slots_at + static_cast<i64>(lane) * row.slots * row.slot_bytes;
    return {row, shared, sequence, counts.moved, counts.seen, producer ? head : tail, producer ? tail : head,
            row.data + low, slots, nbytes, pieces, few ? row.put_warps : warps, lane == 0};
}

// Both ends differ about a message: with this end's words in place, stop the ring.
XV_DEVICE void report_mismatch(const Part& p) {
    if (p.row.producer) {
        u64* own = entry(p.row, p.sequence, true);
        for (u32 i = 0; i < 5; ++i) store(own + 1 + i, field(p.row, i));
        fence_system();
        store(own, p.sequence + 1);
    }
    fence_system();
    u64* abort = word(p.row, XV_ABORT);
    if (!load(abort)) store(abort, XV_MISMATCH | static_cast<u64>(p.row.peer) << 8);
}

// Move one lane's part of a message. Whether it was moved.
XV_DEVICE bool move_lane(const Row& row, u32 lane) {
    __shared__ Shared shared;
    Part p = part_of(row, shared, lane);
    const bool producer = row.producer;
    __syncthreads();
    if (p.leader && threadIdx.x / WIDTH == (blockDim.x - 1) / WIDTH && !agree(shared.left)) begin(p);
    if (p.leader && producer && watches() && !agree(shared.left)) {
        if (await_place(p)) write_entry(p);
        else shared.left = 1;
        if (p.pieces == 0 && !agree(shared.left)) publish(p, 0);
    }
    WatchState w = {shared.ready, 0, 0, producer ? EQUAL : OPEN, false};
    u32 piece = 0;
    bool watching = watches(), copying = copies(p);
    while (watching || copying) {
        if (watching) watching = watch(p, w);
        if (copying) copying = copy(p, piece);
    }
    __syncthreads();
    const bool moved = !shared.left;
    if (threadIdx.x == 0) {
        row.state->lanes[lane] = Lane{p.start + p.pieces, p.seen};
        if (p.leader && shared.verdict == DIFFERENT) report_mismatch(p);
    }
    __syncthreads();
    return moved;
}

// What the last block of a transfer says of it. Nothing here is read before the launch ends but by the host and the
// other end, so it needs no fence.
XV_DEVICE void finish(const Row& row, bool moved) {
    constexpr u32 LEFT = 1u << 16;
    u32 left = moved ? 0 : LEFT;
    if (row.blocks > 1) {
        left += add(&row.state->done, 1 + left);
        if (left % LEFT != row.blocks - 1) return;
        row.state->done = 0;
    }
    const u64 sequence = row.state->sequence;
    u64* turn = word(row, XV_TURNS + (row.producer ? 0 : XV_LINE));
    if (left >= LEFT) {
        // A message that was given up stays the next one: later launches leave at once and say the same.
        row.state->stopped = 1;
        store(turn, ~sequence);
        return;
    }
    row.state->sequence = sequence + 1;
    if (!row.producer) store(word(row, XV_CONSUMED), sequence + 1);
    store(turn, sequence + 1);
}

XV_DEVICE void move_rows(const Batch& batch) {
    u32 number = 0;
    while (blockIdx.x >= batch.rows[number].block + batch.rows[number].blocks) ++number;
    const Row& row = batch.rows[number];
    bool moved = true;
    for (u32 lane = blockIdx.x - row.block; moved && lane < row.lanes; lane += row.blocks)
        moved = move_lane(row, lane);
    if (threadIdx.x == 0) finish(row, moved);
}

// ------------------------------------------------------------------------------------------------------ local kernels

struct Terms {
    char* dst;
    i64 count;
    i64 ways;
    i64 head;  // elements before those that lie aligned in all operands
    i64 code;
    i64 divisor;  // of a sum, or 0
    const char* srcs[XV_TERMS];
};

struct Scaling {
    char* dst;
    const char* src;
    i64 count;
    double factor;
    i64 divisor;
    i64 head;
    i64 dtype;
};

// `COUNT` elements at once, from element `index` on; low precision adds up and divides in float32 and rounds once.
template <int DTYPE, int OP, u32 COUNT>
XV_DEVICE void reduce_some(const Terms& terms, i64 index) {
    typedef Element<DTYPE> E;
    struct alignas(COUNT * sizeof(typename E::Item)) Some {
        typename E::Item items[COUNT];
    };
    const i64 offset = index * sizeof(typename E::Item);
    Some some = *reinterpret_cast<const Some*>(terms.srcs[0] + offset);
    if (terms.ways > 1) {
        typename E::Wide total[COUNT];
        XV_UNROLL
        for (u32 i = 0; i < COUNT; ++i) total[i] = E::load(some.items[i]);
        for (i64 way = 1; way < terms.ways; ++way) {
            some = *reinterpret_cast<const Some*>(terms.srcs[way] + offset);
            XV_UNROLL
            for (u32 i = 0; i < COUNT; ++i) total[i] = Operation<DTYPE, OP>::of(total[i], E::load(some.items[i]));
        }
        XV_UNROLL
        for (u32 i = 0; i < COUNT; ++i)
            some.items[i] = E::save(OP == XV_SUM && terms.divisor ? quotient(total[i], terms.divisor) : total[i]);
    }
    *reinterpret_cast<Some*>(terms.dst + offset) = some;
}

template <int DTYPE>
XV_DEVICE typename Element<DTYPE>::Item scale_one(typename Element<DTYPE>::Item item, double factor, i64 divisor) {
    typedef Element<DTYPE> E;
    const typename E::Wide value = E::load(item);
    return E::save(divisor ? quotient(value, divisor) : scaled(value, factor));
}

template <int DTYPE, int OP>
XV_DEVICE void reduce_all(const Terms& terms) {
    constexpr u32 COUNT = Pack<typename Element<DTYPE>::Item>::COUNT;
    const i64 first = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x, step = static_cast<i64>(gridDim.x) * blockDim.x;
    const i64 head = terms.head, packs = (terms.count - head) / COUNT;
    for (i64 i = first; i < packs; i += step) reduce_some<DTYPE, OP, COUNT>(terms, head + i * COUNT);
    for (i64 i = first; i < terms.count - packs * COUNT; i += step)
        reduce_some<DTYPE, OP, 1>(terms, i < head ? i : i + packs * COUNT);
}

template <int DTYPE>
XV_DEVICE void scale_all(const Scaling& how) {
    typedef typename Element<DTYPE>::Item Item;
    constexpr u32 COUNT = Pack<Item>::COUNT;
    const i64 first = static_cast<i64>(blockIdx.x) * blockDim.x + threadIdx.x, step = static_cast<i64>(gridDim.x) * blockDim.x;
    const i64 head = how.head, packs = (how.count - head) / COUNT;
    const Item* src = reinterpret_cast<const Item*>(how.src);
    Item* dst = reinterpret_cast<Item*>(how.dst);
    for (i64 i = first; i < packs; i += step) {
        Pack<Item> pack = {*reinterpret_cast<const Word*>(src + head + i * COUNT)};
        XV_UNROLL
        for (u32 k = 0; k < COUNT; ++k) pack.items[k] = scale_one<DTYPE>(pack.items[k], how.factor, how.divisor);
        *reinterpret_cast<Word*>(dst + head + i * COUNT) = pack.word;
    }
    for (i64 n = first; n < how.count - packs * COUNT; n += step) {
        const i64 i = n < head ? n : n + packs * COUNT;
        dst[i] = scale_one<DTYPE>(src[i], how.factor, how.divisor);
    }
}

// ------------------------------------------------------------------------------------------------------------ kernels

// Up to XV_ROWS transfers at the same time.
__global__ void __launch_bounds__(XV_THREADS, 2) move(const Batch batch) { move_rows(batch); }

__global__ void reduce(const Terms terms) {
    switch (terms.code) {
#define XV_CASE(D, O) case code_of(XV_##D, XV_##O): return reduce_all<XV_##D, XV_##O>(terms);
        XV_REDUCTIONS(XV_CASE)
#undef XV_CASE
    }
}

__global__ void scale(const Scaling how) {
    switch (how.dtype) {
#define XV_CASE(D) case XV_##D: return scale_all<XV_##D>(how);
        XV_NUMBERS(XV_CASE)
#undef XV_CASE
    }
}

}  // namespace xv
