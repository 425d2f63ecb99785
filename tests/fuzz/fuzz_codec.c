/*
 * fuzz_codec.c - any bytes: refused with a reason, or a message that survives the way out and back
 *
 * The same bytes go through every reader of outside bytes in proto/: structural check, request,
 * reply, search, JSON.
 */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "proto/codec.h"
#include "proto/scan.h"

#define SPACE (2 * PROTO_DATAGRAM_MAX)

static uint8_t first[SPACE], second[SPACE];
static struct codec *codec;

static void check(int holds)
{
    if (!holds)
        abort();
}

/* Every byte range of a decoded message lies in the datagram. */
static void check_inside(const void *p, size_t n, const uint8_t *bytes, size_t size)
{
    check(n == 0 || ((const uint8_t *)p >= bytes && (const uint8_t *)p + n <= bytes + size));
}

static void check_tensor(const struct proto_tensor *t, const uint8_t *bytes, size_t size)
{
    check(proto_dtype_name(t->dtype) != NULL);
    check(t->rank <= PROTO_RANK_MAX);
    for (unsigned k = 0; k < t->rank; k++)
        check(t->shape[k] >= 0);
    if (t->is_inline) {
        check(t->n_bytes <= PROTO_INLINE_MAX);
        check_inside(t->bytes, t->n_bytes, bytes, size);
    }
}

static void fuzz_request(const uint8_t *bytes, size_t size, bool is_sound)
{
    struct proto_request request;
    const char *reason = NULL;
    uint64_t id;
    bool has_id;
    int n, r;

    r = codec_decode_request(codec, bytes, size, &request, &has_id, &id, &reason);
    if (r < 0) {
        check(r == -EBADMSG && reason && *reason);
        check(is_sound || !has_id);
        return;
    }
    check(is_sound && has_id && id == request.id && proto_verb_name(request.verb));
    if (request.verb == VERB_INFER) {
        check(request.infer.model.n >= 1 && request.infer.model.n <= PROTO_NAME_MAX);
        check_inside(request.infer.model.s, request.infer.model.n, bytes, size);
        check(request.infer.priority <= PROTO_PRIORITY_MAX);
        check_tensor(&request.infer.input, bytes, size);
        if (request.infer.has_output)
            check_tensor(&request.infer.output, bytes, size);
    }
    n = codec_encode_request(&request, first, sizeof first);
    check(n > 0);
    check(codec_decode_request(codec, first, (size_t)n, &request, &has_id, &id, &reason) == 0);
    check(codec_encode_request(&request, second, sizeof second) == n);
    check(memcmp(first, second, (size_t)n) == 0);
}

static void fuzz_reply(const uint8_t *bytes, size_t size, bool is_sound)
{
    struct proto_reply reply;
    const char *reason = NULL;
    int n, r;

    r = codec_decode_reply(codec, bytes, size, &reply, &reason);
    if (r < 0) {
        check(r == -EBADMSG && reason && *reason);
        return;
    }
    check(is_sound && (reply.has_id || reply.error));
    if (reply.error)
        check_inside(reply.text.s, reply.text.n, bytes, size);
    else if (reply.verb == VERB_INFER)
        check_tensor(&reply.infer.output, bytes, size);
    else if (reply.verb != VERB_BUFFER_CREATE && reply.verb != VERB_BUFFER_REGISTER)
        check_inside(reply.document.bytes, reply.document.n_bytes, bytes, size);
    n = codec_encode_reply(&reply, first, sizeof first);
    check(n > 0);
    check(codec_decode_reply(codec, first, (size_t)n, &reply, &reason) == 0);
    check(codec_encode_reply(&reply, second, sizeof second) == n);
    check(memcmp(first, second, (size_t)n) == 0);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);
int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
    static const char *const paths[] = {
        "",   "result", "limits.unread_replies", "models.0.name", "1.1.1", "0..1", "1234567890",
        "1x", "x"};
    const char *reason = NULL;
    const uint8_t *found;
    bool is_sound;
    size_t n;
    char *json;
    int r;

    if (!codec)
        codec = codec_new();
    check(codec != NULL);
    is_sound = codec_check(bytes, size, &reason) == 0;
    check(is_sound || (reason && *reason));
    fuzz_request(bytes, size, is_sound && size <= PROTO_DATAGRAM_MAX);
    fuzz_reply(bytes, size, is_sound && size <= PROTO_DATAGRAM_MAX);
    for (size_t k = 0; k < sizeof paths / sizeof paths[0]; k++)
        if (scan_find(bytes, size, paths[k], &found, &n) == 0)
            check_inside(found, n, bytes, size);
    r = codec_json(bytes, size, &json);
    check(r == 0 || r == -EBADMSG);
    check(is_sound || r < 0);
    if (r == 0) {
        check(*json != 0);
        free(json);
    }
    return 0;
}
