/* Arithmetic of the reductions. float16, bfloat16 and the float8s are widened to float32. */
#include "combine.h"
#include <math.h>
#include <stdint.h>
#include <string.h>

enum { INT8, UINT8, INT32, UINT32, INT64, UINT64, FLOAT16, FLOAT32, FLOAT64, BFLOAT16, E4M3, E5M2, DTYPES };

/* The types that arithmetic is done in. */
#define INTEGERS(X) \
    X(INT8, int8_t) X(UINT8, uint8_t) X(INT32, int32_t) X(UINT32, uint32_t) X(INT64, int64_t) X(UINT64, uint64_t)
#define FLOATS(X) X(FLOAT32, float) X(FLOAT64, double)

size_t item_bytes(int dtype) {
    static const size_t bytes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};
    return dtype >= 0 && dtype < DTYPES ? bytes[dtype] : 0;
}

static int wide(int dtype) { return dtype == FLOAT16 || dtype >= BFLOAT16 ? FLOAT32 : dtype; }

size_t wide_bytes(int dtype) { return item_bytes(wide(dtype)); }

static float load8(uint8_t bits, int mantissa) {
    int bias = mantissa == 3 ? 7 : 15, one = 1 << mantissa;
    int code = bits & 0x7f, exponent = code / one, fraction = code % one;
    float value = ldexpf(exponent ? one + fraction : fraction, (exponent ? exponent : 1) - bias - mantissa);
    if (mantissa == 3 && code == 0x7f) value = NAN;
    if (mantissa == 2 && code >= 0x7c) value = code == 0x7c ? INFINITY : NAN;
    return bits & 0x80 ? -value : value;
}

/* What is too large becomes NaN in e4m3, which has no infinity, and infinite in e5m2. */
static uint8_t save8(float value, int mantissa) {
    int bias = mantissa == 3 ? 7 : 15, sign = signbit(value) ? 0x80 : 0, infinite = mantissa == 3 ? 0x7f : 0x7c;
    if (isnan(value)) return sign | (mantissa == 3 ? 0x7f : 0x7e);
    if (isinf(value)) return sign | infinite;
    int exponent = value == 0 ? 1 - bias : ilogbf(value);
    if (exponent < 1 - bias) exponent = 1 - bias; /* a subnormal */
    int code = ((exponent + bias - 1) << mantissa) + (int)rintf(ldexpf(fabsf(value), mantissa - exponent));
    return sign | (code < infinite ? code : infinite);
}

static float load(int dtype, const void *from, size_t i) {
    uint32_t bits;
    float value;
    switch (dtype) {
    case FLOAT16: return ((const _Float16 *)from)[i];
    case E4M3: return load8(((const uint8_t *)from)[i], 3);
    case E5M2: return load8(((const uint8_t *)from)[i], 2);
    }
    bits = (uint32_t)((const uint16_t *)from)[i] << 16;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void save(int dtype, void *to, size_t i, float value) {
    uint32_t bits;
    switch (dtype) {
    case FLOAT16: ((_Float16 *)to)[i] = (_Float16)value; return;
    case E4M3: ((uint8_t *)to)[i] = save8(value, 3); return;
    case E5M2: ((uint8_t *)to)[i] = save8(value, 2); return;
    }
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = isnan(value) ? bits | 0x400000 : bits + 0x7fff + (bits >> 16 & 1);
    ((uint16_t *)to)[i] = rounded >> 16;
}

void widen(int dtype, void *to, const void *from, size_t count, const void *factor) {
    if (wide(dtype) == dtype) memcpy(to, from, count * item_bytes(dtype));
    else
        for (size_t i = 0; i < count; i++) ((float *)to)[i] = load(dtype, from, i);
    if (!factor) return;
    double room; /* for any wide element */
    void *one = &room;
    widen(dtype, one, factor, 1, NULL);
    switch (wide(dtype)) {
#define SCALE(number, type) case number: for (size_t i = 0; i < count; i++) ((type *)to)[i] *= *(type *)one; break;
        INTEGERS(SCALE) FLOATS(SCALE)
    }
}

/* NCCL's minimum and maximum pass over NaN, as fmin and fmax do. */
#define INTEGER_MIN(a, b) (b < a ? b : a)
#define INTEGER_MAX(a, b) (b > a ? b : a)
#define COMBINE(type, min, max)                                   \
    for (size_t i = 0; i < count; i++) {                          \
        type a = ((type *)into)[i], b = ((const type *)from)[i];  \
        switch (op) {                                             \
        case PROD: a = a * b; break;                              \
        case MIN: a = min(a, b); break;                           \
        case MAX: a = max(a, b); break;                           \
        default: a = a + b;                                       \
        }                                                         \
        ((type *)into)[i] = a;                                    \
    }

void combine(int dtype, int op, void *into, const void *from, size_t count) {
    switch (wide(dtype)) {
#define INTEGER_COMBINE(number, type) case number: COMBINE(type, INTEGER_MIN, INTEGER_MAX) break;
#define FLOAT_COMBINE(number, type) case number: COMBINE(type, fmin, fmax) break;
        INTEGERS(INTEGER_COMBINE) FLOATS(FLOAT_COMBINE)
    }
}

void narrow(int dtype, void *to, void *from, size_t count, int divisor) {
    if (divisor != 1) switch (wide(dtype)) {
#define DIVIDE(number, type) case number: for (size_t i = 0; i < count; i++) ((type *)from)[i] /= (type)divisor; break;
        INTEGERS(DIVIDE) FLOATS(DIVIDE)
    }
    if (wide(dtype) == dtype) memcpy(to, from, count * item_bytes(dtype));
    else
        for (size_t i = 0; i < count; i++) save(dtype, to, i, ((float *)from)[i]);
}
