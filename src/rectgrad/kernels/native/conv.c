/* The gradient at the input of a convolution or linear layer, from the few units of R that passed.

   in[i, y*stride + ky, x*stride + kx] += R[o, y, x] * w[o, i, ky, kx]

   The input is cut into tiles (rows of a sample, or several whole samples) and blocks of channels. For one tile
   and block the sum is kept pixel by pixel, all channels of the block side by side, in a buffer that fits the
   cache and has room for the padding, so that nothing is checked inside. The taps of one output channel stay in
   registers while its units are added. On the way out the buffer is transposed to (channel, y, x). */
#include "parallel.h"
#include "rectgrad.h"
#include <stdlib.h>
#include <string.h>

#if defined(__AVX512F__)
#define LANES 16
#else
#define LANES 8
#endif
typedef float vec __attribute__((vector_size(LANES * 4)));
typedef float loose __attribute__((vector_size(LANES * 4), aligned(4)));

#define TILE_BYTES (384 * 1024)
#define AHEAD 2 /* output channels whose weights are fetched beforehand */

typedef struct {
    int32_t y, x;
    float value;
} unit;

typedef struct {
    unit *units;
    int32_t *start; /* of each output channel, and the end */
} sample_units;

/* A tile: rows [first, last) of the padded input of samples [sample, end). Its units, by output channel. */
typedef struct {
    int64_t sample, end, first, last, segments;
    int32_t *channel, *start; /* of each segment, and the end */
    int32_t *offset;          /* of each unit: its first tap in the buffer, in pixels */
    float *value;
} tile;

typedef struct {
    const survivors *s;
    const convolution *c;
    const float *weight, *scale;
    float *out;
    sample_units *samples;
    tile *tiles;
    int64_t n_tiles, blocks, block, vectors; /* blocks a group, channels a block, vectors a pixel */
    int64_t pitch, above, rows, in_group, out_group, taps;
    int failed;
} job;

/* ---- units of a sample, by channel ---------------------------------------------------------------- */

static void read_sample(void *context, int64_t n) {
    job *j = context;
    const convolution *c = j->c;
    int64_t count = j->s->count[n], plane = c->out_height * c->out_width, kept = 0, channel = 0;
    sample_units *u = &j->samples[n];
    if (count < 0) return;
    u->units = malloc((count + 1) * sizeof *u->units);
    u->start = malloc((c->channels_out + 1) * sizeof *u->start);
    if (!u->units || !u->start) {
        j->failed = 1;
        return;
    }
    u->start[0] = 0;
    int64_t base = 0;
    const double line = 1.0 / (double)c->out_width; /* exact for the whole numbers below 2^31, and no division */
    const int32_t *position = j->s->position[n];
    const float *value = j->s->value[n];
    for (int64_t i = 0; i < count; i++) {
        while (position[i] - base >= plane) base += plane, u->start[++channel] = (int32_t)kept;
        int32_t at = position[i] - (int32_t)base, y = (int32_t)(((double)at + 0.5) * line);
        int32_t x = at - y * (int32_t)c->out_width;
        if (y < c->first_y || y >= c->last_y || x < c->first_x || x >= c->last_x) continue;
        u->units[kept++] = (unit){y, x, j->scale ? value[i] * j->scale[channel] : value[i]};
    }
    while (channel < c->channels_out) u->start[++channel] = (int32_t)kept;
}

/* The first of units [from, to) with y >= least. */
static int32_t at_row(const unit *units, int32_t from, int32_t to, int64_t least) {
    while (from < to) {
        int32_t middle = from + (to - from) / 2;
        if (units[middle].y < least)
            from = middle + 1;
        else
            to = middle;
    }
    return from;
}

/* ---- units of a tile ------------------------------------------------------------------------------- */

static void read_tile(void *context, int64_t i) {
    job *j = context;
    const convolution *c = j->c;
    tile *t = &j->tiles[i];
    int64_t reach = (c->kernel_y - 1) * c->dilation_y, most = 0, n = 0;
    for (int64_t k = t->sample; k < t->end; k++)
        if (j->samples[k].start) most += j->samples[k].start[c->channels_out];
    t->channel = malloc((c->channels_out + 1) * 4);
    t->start = malloc((c->channels_out + 1) * 4);
    t->offset = malloc((most + 1) * 4);
    t->value = malloc((most + 1) * 4);
    if (!t->channel || !t->start || !t->offset || !t->value) {
        j->failed = 1;
        return;
    }
    int whole = t->last - t->first >= j->rows;
    /* rows y of R with a tap in the tile: first - reach <= y * stride < last */
    int64_t low = t->first - reach > 0 ? (t->first - reach + c->stride_y - 1) / c->stride_y : 0;
    int64_t high = (t->last - 1) / c->stride_y + 1;
    for (int64_t o = 0; o < c->channels_out; o++) {
        int64_t before = n;
        for (int64_t k = t->sample; k < t->end; k++) {
            const sample_units *u = &j->samples[k];
            if (!u->start) continue;
            int32_t from = u->start[o], to = u->start[o + 1];
            if (!whole) from = at_row(u->units, from, to, low), to = at_row(u->units, from, to, high);
            int64_t origin = ((k - t->sample) * j->rows - (whole ? 0 : t->first - j->above)) * j->pitch;
            for (int32_t e = from; e < to; e++) {
                t->offset[n] = (int32_t)(origin + u->units[e].y * c->stride_y * j->pitch + u->units[e].x * c->stride_x);
                t->value[n++] = u->units[e].value;
            }
        }
        if (n > before) t->channel[t->segments] = (int32_t)o, t->start[t->segments++] = (int32_t)before;
    }
    t->start[t->segments] = (int32_t)n;
}

/* ---- the sum of one tile and block ------------------------------------------------------------------ */

/* Taps of one output channel for the channels of a block: (tap, channel), zero beyond the block's end. */
static void pack(const float *w, int64_t taps, int64_t channels, int64_t lanes, float *packed) {
    if (channels < lanes) memset(packed, 0, taps * lanes * 4);
    if (taps == 1) {
        memcpy(packed, w, channels * 4);
        return;
    }
    for (int64_t i = 0; i < channels; i++)
        for (int64_t t = 0; t < taps; t++) packed[t * lanes + i] = w[i * taps + t];
}

static inline void fetch(const float *w, int64_t n) {
    for (int64_t i = 0; i < n; i += 16) __builtin_prefetch(w + i);
}

/* One segment with a kernel of constant size: KY x KX taps of V vectors each. */
#define FIXED(NAME, KY, KX, V)                                                                                 \
    static void NAME(float *sum, int64_t pitch, const int32_t *offset, const float *value, int64_t n,          \
                     const float *packed) {                                                                    \
        vec w[KY * KX * V];                                                                                    \
        for (int t = 0; t < KY * KX * V; t++) w[t] = *(const loose *)(packed + t * LANES);                     \
        for (int64_t e = 0; e < n; e++) {                                                                      \
            float *p = sum + (int64_t)offset[e] * (V * LANES), v = value[e];                                   \
            for (int y = 0; y < KY; y++, p += pitch * (V * LANES))                                             \
                for (int x = 0; x < KX * V; x++) *(vec *)(p + x * LANES) += w[y * KX * V + x] * v;             \
        }                                                                                                      \
    }
FIXED(add_1x1, 1, 1, 4)
FIXED(add_3x3, 3, 3, 1)
FIXED(add_1x3, 1, 3, 2)
FIXED(add_3x1, 3, 1, 2)
FIXED(add_1x7, 1, 7, 1)
FIXED(add_7x1, 7, 1, 1)
FIXED(add_5x5, 5, 5, 1)

typedef void (*fixed)(float *, int64_t, const int32_t *, const float *, int64_t, const float *);
static const struct {
    int64_t y, x, vectors;
    fixed add;
} kernels[] = {{1, 1, 4, add_1x1}, {3, 3, 1, add_3x3}, {1, 3, 2, add_1x3}, {3, 1, 2, add_3x1},
               {1, 7, 1, add_1x7}, {7, 1, 1, add_7x1}, {5, 5, 1, add_5x5}};
#define KERNELS ((int)(sizeof kernels / sizeof *kernels))

static int kernel_for(const convolution *c) {
    for (int k = 0; k < KERNELS; k++)
        if (kernels[k].y == c->kernel_y && kernels[k].x == c->kernel_x && c->dilation_x == 1 && c->dilation_y == 1)
            return k;
    return -1;
}

static void add_any(const job *j, float *sum, const int32_t *offset, const float *value, int64_t n,
                    const float *packed) {
    const convolution *c = j->c;
    for (int64_t e = 0; e < n; e++)
        for (int64_t y = 0; y < c->kernel_y; y++)
            for (int64_t x = 0; x < c->kernel_x; x++) {
                int64_t at = offset[e] + y * c->dilation_y * j->pitch + x * c->dilation_x;
                vec *p = (vec *)(sum + at * LANES);
                *p += *(const loose *)(packed + (y * c->kernel_x + x) * LANES) * value[e];
            }
}

/* A square of LANES pixels by LANES channels, turned round in registers: halves of ever larger blocks change
   places. */
#if defined(__GNUC__) && (__GNUC__ >= 12 || defined(__clang__))
#define SQUARES 1
#if LANES == 16
#define PICK_1 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30
#define PICK_2 0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29
#define PICK_4 0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27
#define PICK_8 0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23
#define REST_1 1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31
#define REST_2 2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31
#define REST_4 4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31
#define REST_8 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31
#else
#define PICK_1 0, 8, 2, 10, 4, 12, 6, 14
#define PICK_2 0, 1, 8, 9, 4, 5, 12, 13
#define PICK_4 0, 1, 2, 3, 8, 9, 10, 11
#define REST_1 1, 9, 3, 11, 5, 13, 7, 15
#define REST_2 2, 3, 10, 11, 6, 7, 14, 15
#define REST_4 4, 5, 6, 7, 12, 13, 14, 15
#endif
#define EXCHANGE(STEP)                                                                                         \
    for (int i = 0; i < LANES; i++)                                                                            \
        if (!(i & STEP)) {                                                                                     \
            vec low = row[i], high = row[i + STEP];                                                            \
            row[i] = __builtin_shufflevector(low, high, PICK_##STEP);                                          \
            row[i + STEP] = __builtin_shufflevector(low, high, REST_##STEP);                                   \
        }

static inline void square(const float *sum, int64_t lanes, float *out, int64_t plane) {
    vec row[LANES];
    for (int i = 0; i < LANES; i++) row[i] = *(const vec *)(sum + i * lanes);
    EXCHANGE(1)
    EXCHANGE(2)
    EXCHANGE(4)
#if LANES == 16
    EXCHANGE(8)
#endif
    for (int i = 0; i < LANES; i++) *(loose *)(out + i * plane) = row[i];
}
#endif

/* Pixels [0, n) of the buffer to channel-major memory: out[channel * plane + pixel]. The buffer goes on for
   LANES pixels behind the last one. */
static void transpose(const float *sum, int64_t lanes, int64_t n, int64_t channels, float *out, int64_t plane) {
    int64_t i = 0;
#ifdef SQUARES
    for (; i + LANES <= channels; i += LANES) {
        int64_t x = 0;
        for (; x + LANES <= n; x += LANES) square(sum + x * lanes + i, lanes, out + i * plane + x, plane);
        if (x == n) continue;
        if (n >= LANES) { /* the last square overlaps the one before */
            square(sum + (n - LANES) * lanes + i, lanes, out + i * plane + n - LANES, plane);
            continue;
        }
        float turned[LANES * LANES];
        square(sum + i, lanes, turned, LANES);
        for (int64_t k = 0; k < LANES; k++) memcpy(out + (i + k) * plane, turned + k * LANES, n * 4);
    }
#endif
    for (; i < channels; i++)
        for (int64_t x = 0; x < n; x++) out[i * plane + x] = sum[x * lanes + i];
}

static void write_out(const job *j, const tile *t, const float *sum, int64_t first_channel, int64_t channels) {
    const convolution *c = j->c;
    int64_t plane = c->height * c->width, lanes = j->vectors * LANES;
    int whole = t->last - t->first >= j->rows;
    for (int64_t k = t->sample; k < t->end; k++) {
        if (j->s->count[k] < 0) continue;
        float *out = j->out + (k * c->channels_in + first_channel) * plane;
        const float *from = sum + (k - t->sample) * j->rows * j->pitch * lanes;
        int64_t top = whole ? 0 : t->first - j->above; /* the buffer's first row, in the padded input */
        int64_t y = t->first > c->padding_y ? t->first : c->padding_y;
        int64_t last = t->last < c->height + c->padding_y ? t->last : c->height + c->padding_y;
        int64_t rows = j->pitch == c->width ? last - y : 1; /* without padding they follow each other */
        for (; y < last; y += rows)
            transpose(from + ((y - top) * j->pitch + c->padding_x) * lanes, lanes, rows * c->width, channels,
                      out + (y - c->padding_y) * c->width, plane);
    }
}

static void sum_block(void *context, int64_t task) {
    job *j = context;
    const convolution *c = j->c;
    tile *t = &j->tiles[task % j->n_tiles];
    int64_t block = task / j->n_tiles, group = block / j->blocks, first = block % j->blocks * j->block;
    int64_t channels = j->in_group - first < j->block ? j->in_group - first : j->block;
    int64_t lanes = j->vectors * LANES;
    int64_t rows = t->last - t->first >= j->rows ? j->rows * (t->end - t->sample) : t->last - t->first + 2 * j->above;
    int64_t size = (rows * j->pitch + LANES) * lanes * 4; /* see transpose */
    size = (size + 63) / 64 * 64;
    float *sum = aligned_alloc(64, size), *packed = malloc(j->taps * lanes * 4);
    if (!sum || !packed) {
        free(sum), free(packed);
        j->failed = 1;
        return;
    }
    memset(sum, 0, size);
    int k = kernel_for(c);
    for (int64_t e = 0; e < t->segments; e++) {
        int64_t o = t->channel[e], from = t->start[e];
        if (o / j->out_group != group) continue;
        if (e + AHEAD < t->segments) /* the weights lie far apart: the processor cannot guess the next ones */
            fetch(j->weight + (t->channel[e + AHEAD] * j->in_group + first) * j->taps, j->taps * channels);
        pack(j->weight + (o * j->in_group + first) * j->taps, j->taps, channels, lanes, packed);
        if (k >= 0)
            kernels[k].add(sum, j->pitch, t->offset + from, t->value + from, t->start[e + 1] - from, packed);
        else
            add_any(j, sum, t->offset + from, t->value + from, t->start[e + 1] - from, packed);
    }
    write_out(j, t, sum, group * j->in_group + first, channels);
    free(sum), free(packed);
}

/* ---- few input channels, as of an image: a row of taps side by side, not the channels ------------------ */

#define NARROW 4
#define SPAN 8 /* taps of a row, at most */
typedef float span __attribute__((vector_size(SPAN * 4), aligned(4)));

static int is_narrow(const job *j) {
    const convolution *c = j->c;
    return c->groups == 1 && j->in_group <= NARROW && c->kernel_x <= SPAN && c->dilation_x == 1 && j->taps > 9;
}

static void sum_narrow(void *context, int64_t task) {
    job *j = context;
    const convolution *c = j->c;
    int64_t n = task / c->channels_in, i = task % c->channels_in, pitch = j->pitch + SPAN;
    const sample_units *u = &j->samples[n];
    if (!u->start) return;
    float *sum = calloc(j->rows * pitch, sizeof *sum), *taps = calloc(c->kernel_y * SPAN, sizeof *taps);
    if (sum && taps) {
        for (int64_t o = 0; o < c->channels_out; o++) {
            const float *w = j->weight + (o * j->in_group + i) * j->taps;
            for (int64_t y = 0; y < c->kernel_y; y++) memcpy(taps + y * SPAN, w + y * c->kernel_x, c->kernel_x * 4);
            for (int32_t e = u->start[o]; e < u->start[o + 1]; e++) {
                float *at = sum + u->units[e].y * c->stride_y * pitch + u->units[e].x * c->stride_x;
                for (int64_t y = 0; y < c->kernel_y; y++)
                    *(span *)(at + y * c->dilation_y * pitch) += *(span *)(taps + y * SPAN) * u->units[e].value;
            }
        }
        float *out = j->out + task * c->height * c->width;
        for (int64_t y = 0; y < c->height; y++)
            memcpy(out + y * c->width, sum + (y + c->padding_y) * pitch + c->padding_x, c->width * 4);
    } else {
        j->failed = 1;
    }
    free(sum), free(taps);
}

/* ---- one input channel a group: no block to share, straight into the output -------------------------- */

static void sum_depthwise(void *context, int64_t task) {
    job *j = context;
    const convolution *c = j->c;
    int64_t n = task / c->groups, group = task % c->groups, plane = c->height * c->width;
    const sample_units *u = &j->samples[n];
    if (!u->start) return;
    float *out = j->out + (n * c->channels_in + group) * plane;
    memset(out, 0, plane * 4);
    for (int64_t o = group * j->out_group; o < (group + 1) * j->out_group; o++) {
        const float *w = j->weight + o * j->taps;
        for (int32_t e = u->start[o]; e < u->start[o + 1]; e++) {
            int64_t top = u->units[e].y * c->stride_y - c->padding_y, left = u->units[e].x * c->stride_x - c->padding_x;
            float v = u->units[e].value;
            for (int64_t ky = 0; ky < c->kernel_y; ky++) {
                int64_t y = top + ky * c->dilation_y;
                if (y < 0 || y >= c->height) continue;
                for (int64_t kx = 0; kx < c->kernel_x; kx++) {
                    int64_t x = left + kx * c->dilation_x;
                    if (x >= 0 && x < c->width) out[y * c->width + x] += v * w[ky * c->kernel_x + kx];
                }
            }
        }
    }
}

/* ---- the whole ---------------------------------------------------------------------------------------- */

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }

/* Tiles that fit the cache: several samples where they are small, rows of one where it is large. */
static void cut(job *j) {
    const convolution *c = j->c;
    int64_t lanes = j->vectors * LANES, row = j->pitch * lanes * 4;
    int64_t together = TILE_BYTES / (row * j->rows);
    if (together >= 1) {
        together = least(together, c->samples);
        j->n_tiles = (c->samples + together - 1) / together;
        j->tiles = calloc(j->n_tiles, sizeof *j->tiles);
        for (int64_t i = 0; j->tiles && i < j->n_tiles; i++)
            j->tiles[i] = (tile){i * together, least((i + 1) * together, c->samples), 0, j->rows, 0, 0, 0, 0, 0};
        return;
    }
    int64_t height = most(1, TILE_BYTES / row - 2 * j->above), bands = (j->rows + height - 1) / height;
    if (bands == 1) bands = 2, height = (j->rows + 1) / 2; /* one band is a whole sample */
    j->n_tiles = bands * c->samples;
    j->tiles = calloc(j->n_tiles, sizeof *j->tiles);
    for (int64_t i = 0; j->tiles && i < j->n_tiles; i++) {
        int64_t n = i / bands, first = i % bands * height;
        j->tiles[i] = (tile){n, n + 1, first, least(first + height, j->rows), 0, 0, 0, 0, 0};
    }
}

static void clean(job *j) {
    for (int64_t n = 0; j->samples && n < j->c->samples; n++) free(j->samples[n].units), free(j->samples[n].start);
    for (int64_t i = 0; j->tiles && i < j->n_tiles; i++)
        free(j->tiles[i].channel), free(j->tiles[i].start), free(j->tiles[i].offset), free(j->tiles[i].value);
    free(j->samples), free(j->tiles);
}

int rg_conv(const survivors *s, const convolution *c, const float *weight, const float *scale, float *out,
            int threads) {
    job j = {.s = s, .c = c, .weight = weight, .scale = scale, .out = out};
    j.in_group = c->channels_in / c->groups, j.out_group = c->channels_out / c->groups;
    j.taps = c->kernel_y * c->kernel_x;
    j.above = (c->kernel_y - 1) * c->dilation_y;
    /* The padded input, as far as a tap may reach. */
    j.pitch = most(c->width + 2 * c->padding_x, (c->out_width - 1) * c->stride_x + (c->kernel_x - 1) * c->dilation_x + 1);
    j.rows = most(c->height + 2 * c->padding_y, (c->out_height - 1) * c->stride_y + j.above + 1);
    int k = kernel_for(c);
    j.vectors = k >= 0 ? kernels[k].vectors : 1;
    j.block = j.vectors * LANES;
    j.blocks = (j.in_group + j.block - 1) / j.block;
    j.samples = calloc(c->samples, sizeof *j.samples);
    if (!j.samples) return -1;
    parallel(c->samples, threads, read_sample, &j);
    if (!j.failed && j.in_group == 1) {
        parallel(c->samples * c->groups, threads, sum_depthwise, &j);
    } else if (!j.failed && is_narrow(&j)) {
        parallel(c->samples * c->channels_in, threads, sum_narrow, &j);
    } else if (!j.failed) {
        cut(&j);
        j.failed = !j.tiles;
        if (!j.failed) parallel(j.n_tiles, threads, read_tile, &j);
        if (!j.failed) parallel(j.n_tiles * j.blocks * c->groups, threads, sum_block, &j);
    }
    clean(&j);
    return j.failed ? -1 : 0;
}
