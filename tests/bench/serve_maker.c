/*
 * serve_maker.c - a client that makes large buffers and gives them up, for others to be measured
 * beside it
 *
 *     serve_maker SOCKET MIB COUNT
 *
 * Prints how long each took, in milliseconds. With COUNT 0 it goes on until it is ended.
 */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "client/fused.h"

#define TIMEOUT 60000

static double now_ms(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec * 1e3 + (double)now.tv_nsec * 1e-6;
}

int main(int argc, char **argv)
{
    struct fused *f = NULL;
    long mib, count;
    int r;

    if (argc != 4) {
        fprintf(stderr, "usage: serve_maker SOCKET MIB COUNT\n");
        return 64;
    }
    mib = strtol(argv[2], NULL, 10);
    count = strtol(argv[3], NULL, 10);
    if (mib < 1 || mib > 1 << 20 || count < 0)
        return 64;
    r = fused_connect(argv[1], "maker", &f);
    if (r == 0)
        fused_set_timeout(f, TIMEOUT);
    for (long i = 0; r == 0 && (count == 0 || i < count); i++) {
        struct fused_buffer *buffer;
        double began_ms = now_ms();

        r = fused_buffer_create(f, (size_t)mib << 20, &buffer);
        if (r != 0)
            break;
        printf("%.1f\n", now_ms() - began_ms);
        fflush(stdout);
        fused_buffer_free(buffer);
    }
    if (r != 0)
        fprintf(stderr, "%s: %s\n", argv[1], fused_code_name(r));
    fused_close(f);
    return r == 0 ? 0 : 1;
}
