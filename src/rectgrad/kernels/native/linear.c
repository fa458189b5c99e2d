/* The gradient at the input of a linear layer: in[i] = sum over the few units o that passed of R[o] * w[o, i].
   A strip of columns stays in registers while a position's units are added. */
#include "parallel.h"
#include "rectgrad.h"
#include <math.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4)));
#define VECTORS 8
#define STRIP (VECTORS * LANES)
#define TOGETHER 64 /* positions of one task */

typedef struct {
    const survivors *s;
    int64_t positions, inputs, outputs, strips, groups;
    const float *weight;
    float *out;
} job;

static int64_t first_at(const int32_t *position, int64_t n, int64_t least) {
    int64_t from = 0;
    while (from < n) {
        int64_t middle = from + (n - from) / 2;
        if (position[middle] < least)
            from = middle + 1;
        else
            n = middle;
    }
    return from;
}

static void strip(void *context, int64_t task) {
    job *j = context;
    int64_t row = task % j->s->rows, rest = task / j->s->rows;
    int64_t group = rest % j->groups, column = rest / j->groups * STRIP;
    int64_t n = j->s->count[row], width = j->inputs - column < STRIP ? j->inputs - column : STRIP;
    if (n < 0) return;
    const int32_t *position = j->s->position[row];
    const float *value = j->s->value[row];
    int64_t last = (group + 1) * TOGETHER < j->positions ? (group + 1) * TOGETHER : j->positions;
    int64_t e = first_at(position, n, group * TOGETHER * j->outputs);
    for (int64_t p = group * TOGETHER; p < last; p++) {
        float *out = j->out + (row * j->positions + p) * j->inputs + column;
        const float *w = j->weight + column - p * j->outputs * j->inputs;
        int64_t end = (p + 1) * j->outputs;
        if (width == STRIP) {
            vec sum[VECTORS] = {0};
            for (; e < n && position[e] < end; e++) {
                const float *at = w + position[e] * j->inputs;
                for (int k = 0; k < VECTORS; k++) sum[k] += *(const loose *)(at + k * LANES) * value[e];
            }
            for (int k = 0; k < VECTORS; k++) *(loose *)(out + k * LANES) = sum[k];
        } else {
            memset(out, 0, width * 4);
            for (; e < n && position[e] < end; e++)
                for (int64_t i = 0; i < width; i++) out[i] += w[position[e] * j->inputs + i] * value[e];
        }
    }
}

int rg_linear(const survivors *s, int64_t positions, int64_t inputs, int64_t outputs, const float *weight,
              float *out, int threads) {
    job j = {s, positions, inputs, outputs, (inputs + STRIP - 1) / STRIP, (positions + TOGETHER - 1) / TOGETHER,
             weight, out};
    parallel(s->rows * j.groups * j.strips, threads, strip, &j);
    return 0;
}

void rg_scale(const float *variance, const float *weight, double eps, int64_t n, float *out) {
    for (int64_t i = 0; i < n; i++) out[i] = (weight ? weight[i] : 1) / sqrtf(variance[i] + (float)eps);
}

typedef struct {
    const float *r, *variance, *factor;
    double eps;
    float *out;
    int64_t channels, each;
} scaling;

static void scale_plane(void *context, int64_t plane) {
    const scaling *s = context;
    int64_t channel = plane % s->channels;
    const float *r = s->r + plane * s->each, inverse = (float)(1 / sqrt((double)s->variance[channel] + s->eps));
    float *out = s->out + plane * s->each;
    if (!s->factor) {
        for (int64_t i = 0; i < s->each; i++) out[i] = r[i] * inverse;
        return;
    }
    const float factor = s->factor[channel];
    for (int64_t i = 0; i < s->each; i++) out[i] = r[i] * inverse * factor;
}

void rg_scaled(const float *r, const float *variance, const float *factor, double eps, int64_t planes,
               int64_t channels, int64_t each, float *out, int threads) {
    scaling s = {r, variance, factor, eps, out, channels, each};
    parallel(planes, planes * each < 32768 ? 1 : threads, scale_plane, &s);
}
