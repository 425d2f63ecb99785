/*
 * connected.h - the library, connected to a server that follows a test's script
 */
#pragma once

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "client/fused.h"
#include "server.h"

static struct server server;

static inline struct fused *start(void (*script)(struct server *))
{
    struct fused *f = NULL;
    int r;

    server_start(&server, script);
    r = fused_connect(server.path, "test", &f);
    if (r != 0)
        fail_msg("connect: %s", fused_code_name(r));
    return f;
}

static inline void stop(struct fused *f)
{
    fused_close(f);
    server_stop(&server);
}

static inline void expect_text(const struct fused *f, const char *want)
{
    if (!strstr(fused_error_text(f), want))
        fail_msg("\"%s\"; expected \"%s\"", fused_error_text(f), want);
}

/* A call with 4 bytes inline. */
static inline struct fused_infer small_call(void *data)
{
    struct fused_infer call = FUSED_INFER_INIT;

    call.model = "m";
    call.input = fused_tensor_at(data, FUSED_FLOAT32, 2, (int64_t[]){1, 1});
    return call;
}
