/* The gradient at the input of an average pooling. A window's share of R is the product of one factor for its row
   and one for its column, so that rows and columns are summed one after the other. */
#include "parallel.h"
#include "rectgrad.h"
#include <stdlib.h>
#include <string.h>

typedef struct {
    const pooling *p;
    const float *r;
    float *out;
    float *by_row, *by_column; /* 1 / elements of a window, along each dimension */
    int failed;
} job;

/* 1 / how many elements each window counts along a dimension. */
static float *shares(int64_t windows, int64_t size, int64_t kernel, int64_t stride, int64_t padding, int padded) {
    float *share = malloc((windows + 1) * sizeof *share);
    for (int64_t i = 0; share && i < windows; i++) {
        int64_t from = i * stride - padding, to = from + kernel;
        int64_t last = padded ? size + padding : size;
        if (to > last) to = last;
        if (!padded && from < 0) from = 0;
        share[i] = 1.0f / (float)(to - from);
    }
    return share;
}

/* sum[i * stride - padding + k] += row[i] * share[i], within [0, size). */
static void add_windows(const float *restrict row, const float *restrict share, int64_t windows, int64_t size,
                        int64_t kernel, int64_t stride, int64_t padding, float *restrict sum) {
    for (int64_t k = 0; k < kernel; k++) {
        int64_t shift = k - padding, first = shift < 0 ? (-shift + stride - 1) / stride : 0, last = windows;
        while (last > first && (last - 1) * stride + shift >= size) last--;
        if (stride == 1)
            for (int64_t i = first; i < last; i++) sum[i + shift] += row[i] * share[i];
        else
            for (int64_t i = first; i < last; i++) sum[i * stride + shift] += row[i] * share[i];
    }
}

static void pool_plane(void *context, int64_t plane) {
    job *j = context;
    const pooling *p = j->p;
    const float *r = j->r + plane * p->out_height * p->out_width;
    float *out = j->out + plane * p->height * p->width, *row = malloc((p->width + 1) * sizeof *row);
    if (!row) {
        j->failed = 1;
        return;
    }
    memset(out, 0, p->height * p->width * sizeof *out);
    for (int64_t i = 0; i < p->out_height; i++) {
        memset(row, 0, p->width * sizeof *row);
        add_windows(r + i * p->out_width, j->by_column, p->out_width, p->width, p->kernel_x, p->stride_x,
                    p->padding_x, row);
        int64_t top = i * p->stride_y - p->padding_y;
        for (int64_t y = top < 0 ? 0 : top; y < top + p->kernel_y && y < p->height; y++)
            for (int64_t x = 0; x < p->width; x++) out[y * p->width + x] += row[x] * j->by_row[i];
    }
    free(row);
}

/* Stride 1: the plane lies with a border of zeros in one row, and whole planes are added, shifted. */
static void pool_densely(void *context, int64_t plane) {
    job *j = context;
    const pooling *p = j->p;
    const float *r = j->r + plane * p->out_height * p->out_width;
    float *out = j->out + plane * p->height * p->width;
    int64_t pitch = p->out_width + 2 * (p->kernel_x - 1), rows = p->out_height + 2 * (p->kernel_y - 1);
    int64_t n = rows * pitch, within = n - (p->kernel_x - 1), sums = within - (p->kernel_y - 1) * pitch;
    float *shared = calloc(3 * n, sizeof *shared), *across = shared + n, *sum = across + n;
    if (!shared) {
        j->failed = 1;
        return;
    }
    for (int64_t y = 0; y < p->out_height; y++) {
        float *to = shared + (y + p->kernel_y - 1) * pitch + p->kernel_x - 1;
        for (int64_t x = 0; x < p->out_width; x++) to[x] = r[y * p->out_width + x] * j->by_row[y] * j->by_column[x];
    }
    for (int64_t k = 0; k < p->kernel_x; k++)
        for (int64_t i = 0; i < within; i++) across[i] += shared[i + k];
    for (int64_t k = 0; k < p->kernel_y; k++)
        for (int64_t i = 0; i < sums; i++) sum[i] += across[i + k * pitch];
    for (int64_t y = 0; y < p->height; y++)
        memcpy(out + y * p->width, sum + (y + p->padding_y) * pitch + p->padding_x, p->width * sizeof *out);
    free(shared);
}

int rg_avg_pool(const pooling *p, const float *r, float *out, int threads) {
    job j = {.p = p, .r = r, .out = out};
    j.by_row = shares(p->out_height, p->height, p->kernel_y, p->stride_y, p->padding_y, (int)p->padded);
    j.by_column = shares(p->out_width, p->width, p->kernel_x, p->stride_x, p->padding_x, (int)p->padded);
    j.failed = !j.by_row || !j.by_column;
    int many = p->planes * p->height * p->width < 32768 ? 1 : threads;
    int one = p->stride_y == 1 && p->stride_x == 1;
    if (!j.failed) parallel(p->planes, many, one ? pool_densely : pool_plane, &j);
    free(j.by_row), free(j.by_column);
    return j.failed ? -1 : 0;
}
