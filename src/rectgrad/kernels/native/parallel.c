/* Tasks on several threads: those of the OpenMP runtime in the process if there is one, else our own. */
#include "parallel.h"
#include "rectgrad.h"
#include <stdatomic.h>
#ifndef _WIN32
#include <pthread.h>
#endif

#define MOST_THREADS 256
#define SHARES 16 /* of the tasks, that a thread may take */

typedef struct {
    atomic_llong next;
    int64_t tasks, together; /* small tasks are handed out several at a time: to ask for one takes its time too */
    void (*work)(void *, int64_t);
    void *context;
} queue;

static void (*pool)(void (*)(void *), void *, unsigned, unsigned);

void rg_use_pool(void (*gomp_parallel)(void (*)(void *), void *, unsigned, unsigned)) { pool = gomp_parallel; }

static void drain(void *data) {
    queue *q = data;
    for (int64_t i; (i = atomic_fetch_add(&q->next, q->together)) < q->tasks;)
        for (int64_t end = i + q->together; i < end && i < q->tasks; i++) q->work(q->context, i);
}

#ifndef _WIN32
static void *drained(void *data) {
    drain(data);
    return 0;
}

static void own_threads(queue *q, int threads) {
    pthread_t started[MOST_THREADS];
    int n = 0;
    while (n < threads - 1 && !pthread_create(&started[n], 0, drained, q)) n++;
    drain(q);
    while (n) pthread_join(started[--n], 0);
}
#else
static void own_threads(queue *q, int threads) { (void)threads, drain(q); }
#endif

void parallel(int64_t tasks, int threads, void (*work)(void *, int64_t), void *context) {
    if (threads > tasks) threads = (int)tasks;
    if (threads > MOST_THREADS) threads = MOST_THREADS;
    queue q = {.tasks = tasks, .together = 1, .work = work, .context = context};
    if (threads > 0 && tasks > SHARES * threads) q.together = tasks / (SHARES * threads);
    if (threads <= 1)
        drain(&q);
    else if (pool)
        pool(drain, &q, (unsigned)threads, 0);
    else
        own_threads(&q, threads);
}

unsigned rg_sources(void) {
    return RG_SOURCES;
}

int rg_level(void) {
#if (defined(__x86_64__) || defined(__i386__)) && defined(__GNUC__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw"))
        return 2;
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) return 1;
#endif
    return 0;
}
