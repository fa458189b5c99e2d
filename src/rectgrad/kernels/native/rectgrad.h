/* The native kernels: exact selection, and the backward pass of convolutions and linear layers over the few
   units that it left. A plain C interface: no torch, no Python. Each instruction set is a library of its own,
   built from the same sources. */
#ifndef RECTGRAD_H
#define RECTGRAD_H
#include <stdint.h>

/* What passed a rectified activation: for each row (sample) the units in ascending order with their R.
   A row with count -1 has too many to be worth a list; tau tells which they are. */
typedef struct {
    int64_t rows, units;
    int64_t *count;
    int32_t **position;
    float **value;
    float *tau;
} survivors;

enum { PR1, PR2, PR3, PR4 };

/* The arriving gradient R and the activation a: `rows` rows of `units` floats, the rows this far apart. */
typedef struct {
    const float *a, *r;
    int64_t rows, units, a_stride, r_stride;
    int32_t rule;
} scores;

typedef struct {
    int64_t samples, channels_in, height, width, channels_out, out_height, out_width;
    int64_t kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x, dilation_y, dilation_x, groups;
    int64_t first_y, last_y, first_x, last_x; /* outputs [first, last) pass; the others saw padding */
} convolution;

/* tau is the element at index `rank` from the largest, or the constant given where rank < 0. Rows of which
   more than `densest` (a share) pass get no list. `seen` receives the sum of R: not finite if an R is not. */
survivors *rg_select(const scores *s, int64_t rank, float tau, double densest, double *seen, int threads);
void rg_free(survivors *s);

/* The destructor of a Python capsule that owns a result of rg_select; rg_use_capsules gets the address of
   PyCapsule_GetPointer. */
void rg_use_capsules(void *get_pointer);
void rg_release(void *capsule);

/* R where the score exceeds tau, 0 elsewhere. */
void rg_masked(const survivors *s, const scores *of, float *out, int threads);

/* The gradient at a convolution's input. R is multiplied by `scale`, one number a channel, where not null.
   Returns 0, or -1 without memory. Rows without a list are left as they are. */
int rg_conv(const survivors *s, const convolution *c, const float *weight, const float *scale, float *out,
            int threads);

/* The gradient at a linear layer's input: out (rows, positions, inputs), weight (outputs, inputs). */
int rg_linear(const survivors *s, int64_t positions, int64_t inputs, int64_t outputs, const float *weight,
              float *out, int threads);

/* An average pooling: `padded` says whether windows count the padding. */
typedef struct {
    int64_t planes, height, width, out_height, out_width;
    int64_t kernel_y, kernel_x, stride_y, stride_x, padding_y, padding_x, padded;
} pooling;

/* The gradient at its input: out (planes, height, width) from r (planes, out_height, out_width). Returns 0, or -1
   without memory. */
int rg_avg_pool(const pooling *p, const float *r, float *out, int threads);

/* weight / sqrt(variance + eps), the factor of a batch norm; weight may be null. */
void rg_scale(const float *variance, const float *weight, double eps, int64_t n, float *out);

/* r / sqrt(variance + eps) * factor of planes of `each` floats, one of each a channel; factor may be null. The
   root is taken of doubles and rounded once, the product after each factor. */
void rg_scaled(const float *r, const float *variance, const float *factor, double eps, int64_t planes,
               int64_t channels, int64_t each, float *out, int threads);

/* The relevance factor * c * total of units, total = scale z + shift, and the sum of some of their summands, sign *
   part, plus the positive part of sign * offset if `biased`. Planes of `each` floats; scale, shift and offset are
   numbers for each channel. Like the summands, offset, total and epsilon are meant for a scale of size 1. */
typedef struct {
    const float *c, *z, *part, *scale, *shift, *offset;
    float epsilon, factor, sign, gamma, biased;
    int64_t planes, channels, each;
} sharing;

/* factor * c * total / (sum + epsilon), and 0 where the sum is not positive. With a gamma, the sum is total + gamma *
   sum. With `favoured`, the sum in that is the one of total's sign: `out` is what the weights get, `favoured` what
   their positive parts get in addition. */
void rg_share(const sharing *s, float *out, float *favoured, int threads);

/* c * |z| / (|z| + epsilon) */
void rg_stabilised(const float *c, const float *z, float epsilon, int64_t n, float *out, int threads);

/* Use the thread pool of the OpenMP runtime that is loaded already: a second one would fight it. */
void rg_use_pool(void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned));

unsigned rg_sources(void); /* the digest of the sources that it was built from */
int rg_level(void); /* what this processor has: 2 AVX-512, 1 AVX2, 0 anything else */
#endif
