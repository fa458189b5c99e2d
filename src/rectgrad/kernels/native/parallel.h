#ifndef PARALLEL_H
#define PARALLEL_H
#include <stdint.h>
/* Calls work(context, i) for i = 0 .. tasks - 1, each once, on at most this many threads. */
void parallel(int64_t tasks, int threads, void (*work)(void *context, int64_t i), void *context);
#endif
