/*
 * broadcast.c - reads a tensor as if it had a larger shape
 *
 * PyTorch's rule: a dimension of size 1 repeats. A range of the larger shape is walked in runs of
 * the innermost dimension, in which the tensor either repeats one element or goes on by one, so
 * that the work is done by plain loops.
 */
#include <string.h>

#include "broadcast.h"
#include "loops.h"

struct run {
    int64_t at, n; /* where in the tensor, how many */
    bool repeats;
};

void broadcast_init(struct broadcast *broadcast, const struct shape *shape, const int64_t *dims)
{
    struct broadcast b = {.rank = 0};
    int64_t stride = 1;

    /* From the innermost dimension outwards, then turned round. */
    for (int i = shape->rank - 1; i >= 0; i--) {
        int64_t size = shape->dims[i], step = dims[i] == 1 ? 0 : stride;

        stride *= dims[i];
        if (size == 1)
            continue;
        if (b.rank > 0 && step == b.stride[b.rank - 1] * (step ? b.size[b.rank - 1] : 1)) {
            b.size[b.rank - 1] *= size;
        } else {
            b.size[b.rank] = size;
            b.stride[b.rank++] = step;
        }
    }
    if (b.rank == 0)
        b.size[b.rank++] = 1;
    broadcast->rank = b.rank;
    for (int i = 0; i < b.rank; i++) {
        broadcast->size[i] = b.size[b.rank - 1 - i];
        broadcast->stride[i] = b.stride[b.rank - 1 - i];
    }
}

int64_t broadcast_at(const struct broadcast *broadcast, int64_t i)
{
    int64_t at = 0;

    for (int d = broadcast->rank - 1; d >= 0; d--) {
        at += i % broadcast->size[d] * broadcast->stride[d];
        i /= broadcast->size[d];
    }
    return at;
}

static struct run next_run(const struct broadcast *broadcast, int64_t i, int64_t n)
{
    int64_t size = broadcast->size[broadcast->rank - 1], left = size - i % size;

    return (struct run){.at = broadcast_at(broadcast, i),
                        .n = left < n ? left : n,
                        .repeats = broadcast->stride[broadcast->rank - 1] == 0};
}

void broadcast_load(const struct broadcast *broadcast, const float *tensor, int64_t first,
                    int64_t n, float *to)
{
    for (int64_t done = 0; done < n;) {
        struct run run = next_run(broadcast, first + done, n - done);

        if (run.repeats)
            loops_fill(to + done, (size_t)run.n, tensor[run.at]);
        else
            memcpy(to + done, tensor + run.at, (size_t)run.n * sizeof(*to));
        done += run.n;
    }
}

void broadcast_add(const struct broadcast *broadcast, const float *tensor, int64_t first, int64_t n,
                   float *x)
{
    for (int64_t done = 0; done < n;) {
        struct run run = next_run(broadcast, first + done, n - done);

        if (run.repeats)
            loops_add_scalar(x + done, (size_t)run.n, tensor[run.at]);
        else
            loops_add(x + done, (size_t)run.n, tensor + run.at);
        done += run.n;
    }
}
