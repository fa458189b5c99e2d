/* How units share relevance among their inputs, in one pass over memory instead of six. */
#include "parallel.h"
#include "rectgrad.h"
#include <math.h>

#define CHUNK 16384     /* floats that are one task */
#define SMALLEST 1e-30f /* as in relevance_ops.py */

typedef struct {
    const sharing *s;
    float *out, *favoured;
} job;

static void share_plane(void *context, int64_t plane) {
    const job *j = context;
    const sharing *s = j->s;
    const int64_t each = s->each, channel = plane % s->channels;
    const float *c = s->c + plane * each, *z = s->z + plane * each, *part = s->part + plane * each;
    const float inverse = 1 / fmaxf(fabsf(s->scale[channel]), SMALLEST), epsilon = s->epsilon * inverse;
    const float sign = s->sign, gamma = s->gamma, bias = s->biased * fmaxf(sign * s->offset[channel] * inverse, 0);
    const float scale = s->scale[channel], shift = s->shift[channel], factor = s->factor;
    float *out = j->out + plane * each;
    if (!j->favoured) {
        for (int64_t i = 0; i < each; i++) {
            float total = scale * z[i] + shift, sum = sign * part[i] + bias;
            sum = gamma ? total * inverse + gamma * sum : sum;
            float share = factor * c[i] * total / (sum + epsilon);
            out[i] = sum > 0 ? share : 0;
        }
        return;
    }
    float *favoured = j->favoured + plane * each;
    for (int64_t i = 0; i < each; i++) {
        float total = scale * z[i] + shift, own = total * inverse, above = part[i] + bias;
        float sum = own + gamma * (own > 0 ? above : own - above);
        float share = factor * c[i] * total / (sum + copysignf(epsilon, sum));
        share = sum == 0 ? 0 : share;
        out[i] = own > 0 ? share : share + gamma * share;
        favoured[i] = own > 0 ? gamma * share : -gamma * share;
    }
}

void rg_share(const sharing *s, float *out, float *favoured, int threads) {
    job j = {s, out, favoured};
    parallel(s->planes, s->planes * s->each < 32768 ? 1 : threads, share_plane, &j);
}

typedef struct {
    const float *c, *z;
    float epsilon;
    int64_t n;
    float *out;
} stabilising;

static void stabilise_chunk(void *context, int64_t chunk) {
    const stabilising *s = context;
    int64_t end = (chunk + 1) * CHUNK < s->n ? (chunk + 1) * CHUNK : s->n;
    const float *c = s->c, *z = s->z, epsilon = s->epsilon;
    float *out = s->out;
    for (int64_t i = chunk * CHUNK; i < end; i++) out[i] = fabsf(z[i]) / (fabsf(z[i]) + epsilon) * c[i];
}

void rg_stabilised(const float *c, const float *z, float epsilon, int64_t n, float *out, int threads) {
    stabilising s = {c, z, epsilon, n, out};
    parallel((n + CHUNK - 1) / CHUNK, n < 32768 ? 1 : threads, stabilise_chunk, &s);
}
