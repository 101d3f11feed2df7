// What the hardware gives the simplest code for a stage: no checks, no dispatch, one fixed job.
// Compiled by bounds.py for the machine it runs on; the library uses none of it.

#include <pthread.h>
#include <stdint.h>
#include <string.h>
#ifdef __x86_64__
#include <immintrin.h>
#endif

enum { kMaxThreads = 64, kRowsAhead = 20, kLine = 64 };

typedef struct {
  const char* from;
  char* to;
  const int64_t* row_ids;
  int64_t first, last, count, row_bytes;
  int streams;  // past the caches
} Job;

// REQUIRES: row_bytes is a multiple of 64, `to` is aligned to 64 bytes.
static inline void stream_row(char* to, const char* from, int64_t row_bytes) {
#if defined(__AVX512F__)
  for (int64_t byte = 0; byte < row_bytes; byte += 64)
    _mm512_stream_si512((__m512i*)(to + byte), _mm512_loadu_si512(from + byte));
#elif defined(__AVX2__)
  for (int64_t byte = 0; byte < row_bytes; byte += 32)
    _mm256_stream_si256((__m256i*)(to + byte), _mm256_loadu_si256((const __m256i*)(from + byte)));
#else
  memcpy(to, from, (size_t)row_bytes);
#endif
}

static inline void gather_rows(const Job* job, int64_t row_bytes) {
  for (int64_t i = job->first; i < job->last; ++i) {
    if (i + kRowsAhead < job->count) {
      const char* next = job->from + job->row_ids[i + kRowsAhead] * row_bytes;
      for (int64_t byte = 0; byte < row_bytes; byte += kLine) __builtin_prefetch(next + byte, 0, 3);
    }
    char* to = job->to + i * row_bytes;
    const char* from = job->from + job->row_ids[i] * row_bytes;
    if (job->streams)
      stream_row(to, from, row_bytes);
    else
      memcpy(to, from, (size_t)row_bytes);
  }
}

static inline void scatter_rows(const Job* job, int64_t row_bytes) {
  for (int64_t i = job->first; i < job->last; ++i)
    stream_row(job->to + job->row_ids[i] * row_bytes, job->from + i * row_bytes, row_bytes);
}

// The compiler unrolls the copy of a row whose size it knows.
#define FOR_ROW_BYTES(loop)                       \
  switch (job->row_bytes) {                       \
    case 64: loop(job, 64); break;                \
    case 256: loop(job, 256); break;              \
    case 512: loop(job, 512); break;              \
    default: loop(job, job->row_bytes);           \
  }

static void* run_gather(void* argument) {
  const Job* job = argument;
  FOR_ROW_BYTES(gather_rows)
  return NULL;
}

static void* run_scatter(void* argument) {
  const Job* job = argument;
  FOR_ROW_BYTES(scatter_rows)
  return NULL;
}

static void run(void* (*work)(void*), Job whole, int threads) {
  pthread_t others[kMaxThreads];
  Job jobs[kMaxThreads];
  if (threads > kMaxThreads) threads = kMaxThreads;
  for (int t = 0; t < threads; ++t) {
    jobs[t] = whole;
    jobs[t].first = whole.count * t / threads;
    jobs[t].last = whole.count * (t + 1) / threads;
    if (t > 0) pthread_create(&others[t], NULL, work, &jobs[t]);
  }
  work(&jobs[0]);
  for (int t = 1; t < threads; ++t) pthread_join(others[t], NULL);
}

// packed (count, row_bytes) <- rows row_ids of table
void bound_gather(const char* table, const int64_t* row_ids, char* packed, int64_t count,
                  int64_t row_bytes, int threads, int streams) {
  run(run_gather, (Job){table, packed, row_ids, 0, 0, count, row_bytes, streams}, threads);
}

// rows row_ids of table <- packed (count, row_bytes)
void bound_scatter(const char* packed, const int64_t* row_ids, char* table, int64_t count,
                   int64_t row_bytes, int threads) {
  run(run_scatter, (Job){packed, table, row_ids, 0, 0, count, row_bytes, 1}, threads);
}

// Adds 1 to counts[t][indices[t][i]] of every table t: no check of an index, nothing else noted.
void bound_count(uint32_t* const* counts, const int64_t* const* indices, int64_t tables,
                 int64_t count) {
  for (int64_t t = 0; t < tables; ++t) {
    for (int64_t i = 0; i < count; ++i) {
      if (i + kRowsAhead < count) __builtin_prefetch(counts[t] + indices[t][i + kRowsAhead], 1, 3);
      ++counts[t][indices[t][i]];
    }
  }
}

// Reads an array once; the value keeps the compiler from leaving it out.
uint64_t bound_read(const uint64_t* words, int64_t count) {
  uint64_t sum = 0;
  for (int64_t i = 0; i < count; ++i) sum += words[i];
  return sum;
}
