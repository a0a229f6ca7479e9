/* Arithmetic of the reductions, for rccl.c. Elements are widened, combined in rank order and narrowed once. */
#pragma once
#include <stddef.h>

enum { SUM, PROD, MAX, MIN, AVG, PREMUL_SUM };

size_t item_bytes(int dtype); /* 0: no such type */
size_t wide_bytes(int dtype); /* of an element between `widen` and `narrow` */
/* `factor` is one element that all are multiplied with, or NULL. */
void widen(int dtype, void *to, const void *from, size_t count, const void *factor);
void combine(int dtype, int op, void *into, const void *from, size_t count);
/* `divisor` is 1 unless the op is AVG. */
void narrow(int dtype, void *to, void *from, size_t count, int divisor);
