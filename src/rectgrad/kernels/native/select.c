/* Exact selection. A sample of the scores gives a bound slightly below tau; one pass over a and R computes the
   scores and collects those above the bound, a few per cent; tau is selected among these alone. Where the
   bound was too high, the row is done again over all its positive scores; zeros are only counted. */
#include "parallel.h"
#include "rectgrad.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>
#if defined(__AVX2__)
#include <immintrin.h>
#endif

#define SAMPLE 2048
#define CHUNK 65536 /* units of one task, at most */
#define LEAST 8192
#define SLACK 16    /* a vector's worth that a store may write beyond the last candidate */

typedef struct {
    const scores *s;
    int64_t rank, chunk, chunks, room; /* units of a task, tasks a row, places for the candidates of one */
    float constant, *bound;
    int32_t *position; /* of the candidates, `room` places for each task */
    float *score;
    int64_t *found; /* of each chunk */
    double densest, *sums;
    survivors *result;
    int failed;
} selection;

static inline float score_of(int rule, float a, float r) {
    return rule == PR1 ? a * r : rule == PR2 ? fabsf(a * r) : rule == PR3 ? a : r;
}

/* Floats as integers of the same order; -0 comes just before 0. */
static inline uint32_t ordered(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

static inline float unordered(uint32_t key) {
    uint32_t bits = key & 0x80000000u ? key & 0x7fffffffu : ~key;
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

/* The element at index `rank` from the largest of n, digit by digit: ties cost nothing. */
static float largest(const float *x, int64_t n, int64_t rank, uint32_t *keys) {
    static const int shifts[] = {21, 10, 0}, widths[] = {11, 11, 10};
    for (int64_t i = 0; i < n; i++) keys[i] = ordered(x[i]);
    for (int digit = 0; digit < 3; digit++) {
        uint32_t count[2048] = {0}, mask = (1u << widths[digit]) - 1;
        int shift = shifts[digit];
        for (int64_t i = 0; i < n; i++) count[keys[i] >> shift & mask]++;
        uint32_t bin = mask;
        while (rank >= count[bin]) rank -= count[bin--];
        int64_t kept = 0;
        for (int64_t i = 0; i < n; i++)
            if ((keys[i] >> shift & mask) == bin) keys[kept++] = keys[i];
        n = kept;
    }
    return unordered(keys[0]);
}

/* How many of n numbers exceed the pivot. */
static int64_t above(const float *x, int64_t n, float pivot) {
    int32_t count = 0;
    for (int64_t i = 0; i < n; i++) count += x[i] > pivot;
    return count;
}

/* Those that exceed the pivot, or that it exceeds, to the front: their number. */
static int64_t one_part(float *x, int64_t n, float pivot, int larger) {
    int64_t kept = 0, i = 0;
#if defined(__AVX512F__)
    const __m512 at = _mm512_set1_ps(pivot);
    for (; i + 16 <= n; i += 16) {
        __m512 v = _mm512_loadu_ps(x + i);
        __mmask16 k = larger ? _mm512_cmp_ps_mask(v, at, _CMP_GT_OQ) : _mm512_cmp_ps_mask(v, at, _CMP_LT_OQ);
        _mm512_storeu_ps(x + kept, _mm512_maskz_compress_ps(k, v)); /* not beyond what was read */
        kept += __builtin_popcount(k);
    }
#endif
    for (; i < n; i++) {
        float v = x[i];
        x[kept] = v;
        kept += larger ? v > pivot : v < pivot;
    }
    return kept;
}

#define FEW 512
#define GUESSES 32

/* As `largest`, of numbers that are not NaN; x is used up. A few of them, in order, give a pivot near the rank,
   so that little is left on its side. Where that does not help, digit by digit. */
static float selected(float *x, int64_t n, int64_t rank, uint32_t *keys) {
    for (int tries = 0; n > FEW && tries < 24; tries++) {
        float guess[GUESSES];
        for (int i = 0; i < GUESSES; i++) { /* an insertion sort, the largest first */
            float v = x[(2 * i + 1) * n / (2 * GUESSES)];
            int j = i;
            for (; j > 0 && guess[j - 1] < v; j--) guess[j] = guess[j - 1];
            guess[j] = v;
        }
        float pivot = guess[rank * GUESSES / n];
        int64_t larger = above(x, n, pivot);
        if (rank < larger) {
            n = one_part(x, n, pivot, 1);
            continue;
        }
        int64_t smaller = one_part(x, n, pivot, 0);
        if (rank < n - smaller) return pivot;
        rank -= n - smaller, n = smaller;
    }
    return largest(x, n, rank, keys);
}

/* Scores of units [0, n) that are at least `bound` (above it where strict): their number. */
#if defined(__AVX512F__)
static inline __m512 scores_at(int rule, const float *a, int64_t i, __m512 R) {
    if (rule == PR3) return _mm512_loadu_ps(a + i);
    if (rule == PR4) return R;
    __m512 s = _mm512_mul_ps(_mm512_loadu_ps(a + i), R);
    return rule == PR2 ? _mm512_abs_ps(s) : s;
}

static inline int64_t collect_wide(int rule, int strict, const float *a, const float *r, int64_t n, float bound,
                                   int32_t first, int32_t *position, float *score, double *sum, int64_t *done) {
    const __m512 least = _mm512_set1_ps(bound);
    const __m512i sixteen = _mm512_set1_epi32(16);
    __m512i index = _mm512_add_epi32(_mm512_set1_epi32(first),
                                     _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    __m512 total = _mm512_setzero_ps();
    int64_t found = 0, i = 0;
    for (; i + 16 <= n; i += 16) {
        __m512 R = _mm512_loadu_ps(r + i), s = scores_at(rule, a, i, R);
        total = _mm512_add_ps(total, R);
        __mmask16 k = strict ? _mm512_cmp_ps_mask(s, least, _CMP_GT_OQ) : _mm512_cmp_ps_mask(s, least, _CMP_GE_OQ);
        if (k) { /* a compress and a whole store: to compress into memory is slow on some processors */
            _mm512_storeu_ps(score + found, _mm512_maskz_compress_ps(k, s));
            _mm512_storeu_si512(position + found, _mm512_maskz_compress_epi32(k, index));
            found += __builtin_popcount(k);
        }
        index = _mm512_add_epi32(index, sixteen);
    }
    *sum += _mm512_reduce_add_ps(total);
    *done = i;
    return found;
}
#elif defined(__AVX2__)
static inline int64_t collect_wide(int rule, int strict, const float *a, const float *r, int64_t n, float bound,
                                   int32_t first, int32_t *position, float *score, double *sum, int64_t *done) {
    const __m256 least = _mm256_set1_ps(bound), sign = _mm256_set1_ps(-0.0f);
    __m256 total = _mm256_setzero_ps();
    int64_t found = 0, i = 0;
    for (; i + 8 <= n; i += 8) {
        __m256 R = _mm256_loadu_ps(r + i), s = R;
        if (rule == PR3) s = _mm256_loadu_ps(a + i);
        if (rule == PR1 || rule == PR2) s = _mm256_mul_ps(_mm256_loadu_ps(a + i), R);
        if (rule == PR2) s = _mm256_andnot_ps(sign, s);
        total = _mm256_add_ps(total, R);
        __m256 above = strict ? _mm256_cmp_ps(s, least, _CMP_GT_OQ) : _mm256_cmp_ps(s, least, _CMP_GE_OQ);
        for (int k = _mm256_movemask_ps(above); k; k &= k - 1) {
            int j = __builtin_ctz(k);
            position[found] = first + (int32_t)i + j;
            score[found++] = score_of(rule, a[i + j], r[i + j]);
        }
    }
    float parts[8];
    _mm256_storeu_ps(parts, total);
    for (int j = 0; j < 8; j++) *sum += parts[j];
    *done = i;
    return found;
}
#else
static inline int64_t collect_wide(int rule, int strict, const float *a, const float *r, int64_t n, float bound,
                                   int32_t first, int32_t *position, float *score, double *sum, int64_t *done) {
    (void)rule, (void)strict, (void)a, (void)r, (void)n, (void)bound, (void)first, (void)position;
    (void)score, (void)sum;
    *done = 0;
    return 0;
}
#endif

static inline int64_t collect_by(int rule, int strict, const float *a, const float *r, int64_t n, float bound,
                                 int32_t first, int32_t *position, float *score, double *sum) {
    int64_t i, found = collect_wide(rule, strict, a, r, n, bound, first, position, score, sum, &i);
    for (; i < n; i++) {
        float s = score_of(rule, a[i], r[i]);
        *sum += r[i];
        if (strict ? s > bound : s >= bound) position[found] = first + (int32_t)i, score[found++] = s;
    }
    return found;
}

static int64_t collect(int rule, int strict, const float *a, const float *r, int64_t n, float bound,
                       int32_t first, int32_t *position, float *score, double *sum) {
#define BY(which)                                                                                              \
    if (rule == which)                                                                                         \
        return strict ? collect_by(which, 1, a, r, n, bound, first, position, score, sum)                      \
                      : collect_by(which, 0, a, r, n, bound, first, position, score, sum);
    BY(PR1) BY(PR2) BY(PR3) BY(PR4)
#undef BY
    return 0;
}

static inline const float *a_of(const scores *s, int64_t row) { return s->a ? s->a + row * s->a_stride : s->r; }
static inline const float *r_of(const scores *s, int64_t row) { return s->r + row * s->r_stride; }

/* A bound that tau very probably exceeds; 0 where positive scores do not tell. */
static void sample_row(void *context, int64_t row) {
    selection *c = context;
    const scores *s = c->s;
    const float *a = a_of(s, row), *r = r_of(s, row);
    c->bound[row] = 0;
    if (s->units < 8 * SAMPLE) return;
    float *x = malloc(SAMPLE * 4);
    uint32_t *keys = malloc(SAMPLE * 4);
    if (x && keys) {
        uint64_t noise = 0x9e3779b97f4a7c15ull;
        double step = (double)s->units / SAMPLE;
        for (int64_t i = 0; i < SAMPLE; i++) { /* jittered: a fixed step would see one column of the image */
            noise = noise * 6364136223846793005ull + 1442695040888963407ull;
            int64_t at = (int64_t)(step * ((double)i + (double)(noise >> 40) / (double)(1 << 24)));
            x[i] = score_of(s->rule, a[at], r[at]);
        }
        double expected = (double)c->rank / step;
        int64_t rank = (int64_t)(expected + 4 * sqrt(expected) + 8);
        float bound = rank < SAMPLE ? largest(x, SAMPLE, rank, keys) : 0;
        if (bound > 0) c->bound[row] = bound;
    }
    free(x), free(keys);
}

static void collect_chunk(void *context, int64_t task) {
    selection *c = context;
    const scores *s = c->s;
    int64_t row = task / c->chunks, start = task % c->chunks * c->chunk;
    int64_t n = s->units - start < c->chunk ? s->units - start : c->chunk;
    int64_t at = task * c->room;
    int constant = c->rank < 0;
    float bound = constant ? c->constant : c->bound[row];
    c->found[task] = collect(s->rule, constant || bound == 0, a_of(s, row) + start, r_of(s, row) + start, n, bound,
                             (int32_t)start, c->position + at, c->score + at, c->sums + task);
}

/* The candidates of all chunks of a row, side by side: their number. */
static int64_t gather(selection *c, int64_t row, int32_t *position, float *score) {
    int64_t n = 0;
    for (int64_t chunk = 0; chunk < c->chunks; chunk++) {
        int64_t task = row * c->chunks + chunk, at = task * c->room;
        memcpy(position + n, c->position + at, c->found[task] * 4);
        memcpy(score + n, c->score + at, c->found[task] * 4);
        n += c->found[task];
    }
    return n;
}

static int64_t candidates(const selection *c, int64_t row) {
    int64_t n = 0;
    for (int64_t chunk = 0; chunk < c->chunks; chunk++) n += c->found[row * c->chunks + chunk];
    return n;
}

/* All scores of a row on one side of zero, for what no bound catches: their number. */
static int64_t one_side(const scores *s, int64_t row, int negative, int32_t *position, float *score) {
    const float *a = a_of(s, row), *r = r_of(s, row);
    int64_t n = 0;
    for (int64_t i = 0; i < s->units; i++) {
        float x = score_of(s->rule, a[i], r[i]);
        if (negative ? x < 0 : x > 0) position[n] = (int32_t)i, score[n++] = x;
    }
    return n;
}

/* How many scores of a row are zero; or a number above `enough`, where they are more. */
static int64_t zeros(const scores *s, int64_t row, int64_t enough) {
    const float *a = a_of(s, row), *r = r_of(s, row);
    int64_t n = 0;
    for (int64_t i = 0; i < s->units && n <= enough;) {
        int64_t end = s->units - i < 4096 ? s->units : i + 4096;
        int32_t here = 0;
        for (; i < end; i++) here += score_of(s->rule, a[i], r[i]) == 0;
        n += here;
    }
    return n;
}

/* Of n units those whose score exceeds tau, to the front, with their R instead of the score: their number. */
static int64_t keep_above(float tau, const float *r, int64_t n, int32_t *position, float *score) {
    int64_t kept = 0, i = 0;
#if defined(__AVX512F__)
    const __m512 least = _mm512_set1_ps(tau);
    for (; i + 16 <= n; i += 16) {
        __mmask16 k = _mm512_cmp_ps_mask(_mm512_loadu_ps(score + i), least, _CMP_GT_OQ);
        __m512i at = _mm512_maskz_compress_epi32(k, _mm512_loadu_si512(position + i));
        int count = __builtin_popcount(k);
        __m512 R = _mm512_mask_i32gather_ps(_mm512_setzero_ps(), (__mmask16)((1u << count) - 1), at, r, 4);
        _mm512_storeu_si512(position + kept, at);
        _mm512_storeu_ps(score + kept, R);
        kept += count;
    }
#endif
    for (; i < n; i++) {
        int32_t at = position[i];
        int passes = score[i] > tau;
        position[kept] = at, score[kept] = r[at];
        kept += passes;
    }
    return kept;
}

/* tau of a row and what exceeds it. */
static void finish_row(void *context, int64_t row) {
    selection *c = context;
    const scores *s = c->s;
    survivors *out = c->result;
    int64_t n = candidates(c, row), rank = c->rank;
    int again = rank >= 0 && n <= rank && c->bound[row] > 0;
    int64_t room = again ? s->units : n;
    int32_t *position = malloc((room + 1) * 4);
    float *score = malloc((room + 1) * 4), *copy = 0, tau = c->constant;
    uint32_t *keys = 0;
    if (!position || !score) goto failed;
    if (again)
        n = one_side(s, row, 0, position, score);
    else
        gather(c, row, position, score);
    int dense = 0;
    if (rank >= 0 && n > rank) {
        keys = malloc((n + 1) * 4), copy = malloc((n + 1) * 4);
        if (!keys || !copy) goto failed;
        memcpy(copy, score, n * 4);
        tau = selected(copy, n, rank, keys);
    } else if (rank >= 0) { /* n positive scores do not reach down to tau */
        int64_t rest = rank - n - zeros(s, row, rank - n);
        tau = 0;
        if (rest >= 0) {
            free(position), free(score);
            position = malloc((s->units + 1) * 4), score = malloc((s->units + 1) * 4);
            keys = malloc((s->units + 1) * 4);
            if (!position || !score || !keys) goto failed;
            n = one_side(s, row, 1, position, score);
            /* NaNs count nowhere: with some the rank may lie beyond, and an error follows anyway. */
            tau = n ? selected(score, n, rest < n ? rest : n - 1, keys) : 0;
            dense = 1;
        }
    }
    int64_t passed = dense ? 0 : keep_above(tau, r_of(s, row), n, position, score);
    out->tau[row] = tau;
    out->count[row] = passed;
    if (dense || (double)passed > c->densest * (double)s->units) {
        out->count[row] = -1;
    } else {
        out->position[row] = realloc(position, (passed + 1) * 4), position = 0;
        out->value[row] = realloc(score, (passed + 1) * 4), score = 0;
        if (!out->position[row] || !out->value[row]) goto failed;
    }
    free(position), free(score), free(copy), free(keys);
    return;
failed:
    free(position), free(score), free(copy), free(keys);
    c->failed = 1;
}

static survivors *empty_survivors(int64_t rows, int64_t units) {
    survivors *s = calloc(1, sizeof *s);
    if (!s) return 0;
    s->rows = rows, s->units = units;
    s->count = calloc(rows, sizeof *s->count);
    s->position = calloc(rows, sizeof *s->position);
    s->value = calloc(rows, sizeof *s->value);
    s->tau = calloc(rows, sizeof *s->tau);
    if (s->count && s->position && s->value && s->tau) return s;
    rg_free(s);
    return 0;
}

void rg_free(survivors *s) {
    if (!s) return;
    for (int64_t row = 0; row < s->rows; row++) {
        if (s->position) free(s->position[row]);
        if (s->value) free(s->value[row]);
    }
    free(s->count), free(s->position), free(s->value), free(s->tau), free(s);
}

static void *(*capsule_pointer)(void *, const char *);

void rg_use_capsules(void *get_pointer) { capsule_pointer = (void *(*)(void *, const char *))get_pointer; }

void rg_release(void *capsule) { rg_free(capsule_pointer(capsule, 0)); }

survivors *rg_select(const scores *s, int64_t rank, float tau, double densest, double *seen, int threads) {
    if (s->units >= INT32_MAX || s->units <= 0 || s->rows <= 0) return 0;
    selection c = {.s = s, .rank = rank, .constant = tau, .densest = densest};
    int64_t share = (s->rows * s->units / (4 * (threads > 1 ? threads : 1)) + 15) / 16 * 16;
    c.chunk = share < LEAST ? LEAST : share > CHUNK ? CHUNK : share; /* all threads have something to do */
    c.chunks = (s->units + c.chunk - 1) / c.chunk;
    int64_t tasks = s->rows * c.chunks;
    c.result = empty_survivors(s->rows, s->units);
    c.bound = malloc(s->rows * sizeof *c.bound);
    c.found = calloc(tasks, sizeof *c.found);
    c.sums = calloc(tasks, sizeof *c.sums);
    c.room = (s->units < c.chunk ? s->units : c.chunk) + SLACK;
    c.position = malloc(tasks * c.room * 4); /* reserved; only what candidates fill is touched */
    c.score = malloc(tasks * c.room * 4);
    c.failed = !c.result || !c.bound || !c.found || !c.sums || !c.position || !c.score;
    if (!c.failed) {
        int many = s->rows * s->units < 32768 ? 1 : threads;
        if (rank >= 0) parallel(s->rows, many, sample_row, &c);
        parallel(tasks, many, collect_chunk, &c);
        parallel(s->rows, many, finish_row, &c);
        *seen = 0;
        for (int64_t i = 0; i < tasks; i++) *seen += c.sums[i];
    }
    free(c.bound), free(c.found), free(c.sums), free(c.position), free(c.score);
    if (!c.failed) return c.result;
    rg_free(c.result);
    return 0;
}

typedef struct {
    const survivors *s;
    const scores *of;
    float *out;
} masking;

static void mask_row(void *context, int64_t row) {
    masking *m = context;
    const survivors *s = m->s;
    float *out = m->out + row * s->units;
    if (s->count[row] >= 0) {
        memset(out, 0, s->units * 4);
        for (int64_t i = 0; i < s->count[row]; i++) out[s->position[row][i]] = s->value[row][i];
        return;
    }
    const float *a = a_of(m->of, row), *r = r_of(m->of, row), tau = s->tau[row];
    for (int64_t i = 0; i < s->units; i++) out[i] = score_of(m->of->rule, a[i], r[i]) > tau ? r[i] : 0;
}

void rg_masked(const survivors *s, const scores *of, float *out, int threads) {
    masking m = {s, of, out};
    parallel(s->rows, s->rows * s->units < 32768 ? 1 : threads, mask_row, &m);
}
