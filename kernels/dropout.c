/*
 * dropout.c - PyTorch's CUDA dropout mask, bit for bit
 *
 * PyTorch draws the mask on the GPU: T threads, each with its own Philox stream, take up to four
 * elements a turn. Which counter, thread and word decide about an element follows from that alone,
 * so any range of the tensor can be computed anywhere, in any order:
 *
 *   n a multiple of 4   element e is word e % 4 of thread (e / 4) % T in turn e / 4 / T
 *   n even              element e is word e % 2 of thread (e / 2) % T in turn e / 2 / T
 *   n odd               element e is word (e % 4T) / T of thread e % T in turn e / 4T
 *
 * Keeping compares u = float(word) 2^-32 + 2^-33, in float32, with float(1 - p). u never falls when
 * the word grows, so the words that keep are those below one limit, found once per call; then
 * everything is integers, and blocks of threads are computed side by side in vectors.
 */
#include <math.h>

#include "dropout.h"

#define BLOCK 256 /* threads of PyTorch's blocks */
#define LANES 64  /* Philox streams side by side */

static int64_t mask_threads(int64_t n, int sms, int threads_per_sm)
{
    int64_t resident = (int64_t)sms * (threads_per_sm / BLOCK);
    int64_t wanted = (n + BLOCK - 1) / BLOCK;

    return BLOCK * (wanted < resident ? wanted : resident);
}

void dropout_init(struct dropout *dropout, double p, int64_t n, uint64_t seed, uint64_t offset,
                  int sms, int threads_per_sm)
{
    float keep = (float)(1 - p);

    *dropout = (struct dropout){
        .keep_below = keep,
        .scale = (float)(1.0 / (double)keep),
        .n = n,
        .threads = mask_threads(n, sms, threads_per_sm),
        .seed = seed,
        .counter = offset / 4,
        .vector = n % 4 == 0   ? 4
                  : n % 2 == 0 ? 2
                               : 1,
        .identity = p == 0,
        .zero = p == 1,
    };
}

uint64_t dropout_advance(double p, int64_t n, int sms, int threads_per_sm)
{
    if (p == 0 || p == 1 || n < 1)
        return 0;
    return 4 * (uint64_t)((n - 1) / (4 * mask_threads(n, sms, threads_per_sm)) + 1);
}

uint32_t dropout_first_dropped(float keep_below)
{
    uint32_t low = 0, high = UINT32_MAX; /* the largest word gives 1, which always drops */

    while (low < high) {
        uint32_t middle = low + (high - low) / 2;

        if ((float)middle * 0x1p-32f + 0x1p-33f < keep_below)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Words 0 to 3 of the streams thread, thread + 1, ... at one counter. */
static inline __attribute__((always_inline)) void philox(uint64_t seed, uint64_t counter,
                                                         uint64_t thread, uint32_t words[4][LANES])
{
    uint32_t key0 = (uint32_t)seed, key1 = (uint32_t)(seed >> 32);

    for (int l = 0; l < LANES; l++) {
        words[0][l] = (uint32_t)counter;
        words[1][l] = (uint32_t)(counter >> 32);
        words[2][l] = (uint32_t)(thread + (uint64_t)l);
        words[3][l] = (uint32_t)((thread + (uint64_t)l) >> 32);
    }
    for (int round = 0; round < 10; round++) {
        for (int l = 0; l < LANES; l++) {
            uint64_t a = (uint64_t)words[0][l] * 0xD2511F53u;
            uint64_t b = (uint64_t)words[2][l] * 0xCD9E8D57u;

            words[0][l] = (uint32_t)(b >> 32) ^ words[1][l] ^ key0;
            words[1][l] = (uint32_t)b;
            words[2][l] = (uint32_t)(a >> 32) ^ words[3][l] ^ key1;
            words[3][l] = (uint32_t)a;
        }
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
}

static inline __attribute__((always_inline)) float masked(float x, bool keep, float scale)
{
    return x * (keep ? 1.0f : 0.0f) * scale;
}

/* Elements [first, first + count) when a thread takes `vector` (4 or 2) neighbours at a time. */
static inline __attribute__((always_inline)) void
apply_vector(const struct dropout *dropout, int64_t first, int64_t count, float *x, int vector)
{
    uint32_t limit = dropout_first_dropped(dropout->keep_below), words[4][LANES];
    int64_t end = first + count, done = first;
    float scale = dropout->scale;

    while (done < end) {
        int64_t group = done / vector;
        int64_t turn = group / dropout->threads, thread = group % dropout->threads;
        int64_t groups = dropout->threads - thread;
        int64_t from = group * vector, to;

        groups = groups < LANES ? groups : LANES;
        to = from + groups * vector;
        philox(dropout->seed, dropout->counter + (uint64_t)turn, (uint64_t)thread, words);
        if (from >= first && to <= end && groups == LANES) {
            float *at = x + (from - first);

            for (int l = 0; l < LANES; l++)
                for (int j = 0; j < vector; j++)
                    at[l * vector + j] = masked(at[l * vector + j], words[j][l] < limit, scale);
        } else {
            to = to < end ? to : end;
            for (int64_t e = done; e < to; e++)
                x[e - first] =
                    masked(x[e - first], words[e % vector][(e - from) / vector] < limit, scale);
        }
        done = to;
    }
}

/* The same when a thread's four elements lie T apart. */
static inline __attribute__((always_inline)) void
apply_scattered(const struct dropout *dropout, int64_t first, int64_t count, float *x)
{
    uint32_t limit = dropout_first_dropped(dropout->keep_below), words[4][LANES];
    int64_t end = first + count, done = first, turn_size = 4 * dropout->threads;
    float scale = dropout->scale;

    while (done < end) {
        int64_t word = done % turn_size / dropout->threads, thread = done % dropout->threads;
        int64_t n = dropout->threads - thread;

        n = n < LANES ? n : LANES;
        n = n < end - done ? n : end - done;
        philox(dropout->seed, dropout->counter + (uint64_t)(done / turn_size), (uint64_t)thread,
               words);
        for (int64_t l = 0; l < n; l++)
            x[done - first + l] = masked(x[done - first + l], words[word][l] < limit, scale);
        done += n;
    }
}

__attribute__((target_clones("default", "avx2", "avx512f"))) static void
apply(const struct dropout *dropout, int64_t first, int64_t count, float *x)
{
    if (dropout->vector == 4)
        apply_vector(dropout, first, count, x, 4);
    else if (dropout->vector == 2)
        apply_vector(dropout, first, count, x, 2);
    else
        apply_scattered(dropout, first, count, x);
}

void dropout_apply(const struct dropout *dropout, int64_t first, int64_t count, float *x)
{
    if (dropout->identity)
        return;
    if (dropout->zero) {
        for (int64_t i = 0; i < count; i++)
            x[i] *= 0;
        return;
    }
    apply(dropout, first, count, x);
}
