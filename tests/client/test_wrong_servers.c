/*
 * test_wrong_servers.c - the library against servers that break the protocol
 */
#include <fcntl.h>
#include <sys/mman.h>

#include "../proto/open_fds.h"
#include "connected.h"

static unsigned which;

/* Each case answers one request, in its own way. */
static const struct wrong {
    const char *name, *want;
    bool is_buffer; /* answers buffer.create, else infer */
} wrongs[] = {
    {"garbage", "protocol", false},
    {"unknown id", "not made", false},
    {"id of another generation", "not made", false},
    {"another verb", "another verb", false},
    {"answered twice", "not made", false},
    {"no id", "you sent nonsense", false},
    {"descriptor with a result", "belongs to nothing", false},
    {"two descriptors", "datagram", false},
    {"oversize datagram", "datagram", false},
    {"shape larger than the bytes", "without its bytes", false},
    {"bytes larger than the shape", "without its bytes", false},
    {"shape that overflows", "impossible", false},
    {"in a buffer instead of inline", "without its bytes", false},
    {"request as a reply", "protocol", false},
    {"buffer without descriptor", "without a descriptor", true},
    {"buffer of another size", "another size", true},
    {"buffer that is not sealed", "not sealed", true},
    {"buffer that is a pipe", "not sealed", true},
    {"buffer that is shorter", "not sealed", true},
};

static void send_fds(int socket, const void *bytes, size_t n, int n_fds)
{
    _Alignas(struct cmsghdr) char control[CMSG_SPACE(2 * sizeof(int))] = {0};
    struct iovec part = {(void *)bytes, n};
    struct msghdr message = {.msg_iov = &part,
                             .msg_iovlen = 1,
                             .msg_control = control,
                             .msg_controllen = CMSG_SPACE((size_t)n_fds * sizeof(int))};
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);

    c->cmsg_level = SOL_SOCKET;
    c->cmsg_type = SCM_RIGHTS;
    c->cmsg_len = CMSG_LEN((size_t)n_fds * sizeof(int));
    memset(CMSG_DATA(c), 0, (size_t)n_fds * sizeof(int));
    CHECK(sendmsg(socket, &message, 0) == (ssize_t)n);
}

static void answer_buffer_wrongly(struct server *s, const char *name)
{
    struct proto_reply reply = {.has_id = true,
                                .id = s->request.id,
                                .verb = VERB_BUFFER_CREATE,
                                .buffer = {1, s->request.buffer_create.size_bytes}};
    struct shm shm = SHM_INIT;
    int fds[2], fd;

    CHECK(shm_create(reply.buffer.size_bytes, &shm) == 0);
    CHECK(pipe2(fds, O_CLOEXEC) == 0);
    fd = memfd_create("open", MFD_CLOEXEC | MFD_ALLOW_SEALING);
    CHECK(fallocate(fd, 0, 0, (off_t)reply.buffer.size_bytes) == 0);
    if (strcmp(name, "buffer without descriptor") == 0) {
        server_write(s, &reply, -1);
    } else if (strcmp(name, "buffer of another size") == 0) {
        reply.buffer.size_bytes++;
        server_write(s, &reply, shm.fd);
    } else if (strcmp(name, "buffer that is a pipe") == 0) {
        server_write(s, &reply, fds[0]);
    } else if (strcmp(name, "buffer that is shorter") == 0) {
        shm_deinit(&shm);
        CHECK(shm_create(reply.buffer.size_bytes - 1, &shm) == 0);
        server_write(s, &reply, shm.fd);
    } else {
        server_write(s, &reply, fd);
    }
    shm_deinit(&shm);
    close(fds[0]);
    close(fds[1]);
    close(fd);
}

static void answer_wrongly(struct server *s, const char *name)
{
    static uint8_t big[PROTO_DATAGRAM_MAX + 1];
    struct proto_reply reply = {.has_id = true, .id = s->request.id, .verb = VERB_INFER};
    struct proto_tensor *t = &reply.infer.output;
    int n;

    *t = s->request.infer.input;
    t->bytes = (const uint8_t *)"abcdefgh";
    t->n_bytes = 4;
    if (strcmp(name, "unknown id") == 0)
        reply.id += 1;
    else if (strcmp(name, "id of another generation") == 0)
        reply.id += 65536;
    else if (strcmp(name, "no id") == 0)
        reply = (struct proto_reply){
            .verb = VERB_COUNT, .error = ERR_BAD_MESSAGE, .text = {"you sent nonsense", 17}};
    else if (strcmp(name, "another verb") == 0)
        reply = (struct proto_reply){.has_id = true,
                                     .id = reply.id,
                                     .verb = VERB_PING,
                                     .document = {(const uint8_t *)"\x80", 1}};
    else if (strcmp(name, "shape larger than the bytes") == 0)
        t->shape[0] = 2;
    else if (strcmp(name, "bytes larger than the shape") == 0)
        t->n_bytes = 8;
    else if (strcmp(name, "shape that overflows") == 0)
        t->shape[0] = t->shape[1] = INT64_MAX;
    else if (strcmp(name, "in a buffer instead of inline") == 0)
        t->is_inline = false;
    n = codec_encode_reply(&reply, s->tx, sizeof s->tx);
    CHECK(n > 0);
    if (strcmp(name, "garbage") == 0)
        CHECK(wire_send(s->socket, "\x81\xa2id", 4, -1) == 0);
    else if (strcmp(name, "request as a reply") == 0)
        CHECK(wire_send(s->socket, s->rx, 100, -1) == 0);
    else if (strcmp(name, "oversize datagram") == 0)
        CHECK(send(s->socket, big, sizeof big, 0) == sizeof big);
    else if (strcmp(name, "descriptor with a result") == 0)
        send_fds(s->socket, s->tx, (size_t)n, 1);
    else if (strcmp(name, "two descriptors") == 0)
        send_fds(s->socket, s->tx, (size_t)n, 2);
    else
        server_write(s, &reply, -1);
    if (strcmp(name, "answered twice") == 0)
        server_write(s, &reply, -1);
}

static void script_wrong(struct server *s)
{
    server_hello(s);
    CHECK(server_read(s));
    if (wrongs[which].is_buffer)
        answer_buffer_wrongly(s, wrongs[which].name);
    else
        answer_wrongly(s, wrongs[which].name);
    while (server_read(s))
        ;
}

static void test_wrong_servers(void **state)
{
    unsigned before = open_fds();

    (void)state;
    for (which = 0; which < ARRAY_SIZE(wrongs); which++) {
        struct fused *f = start(script_wrong);
        uint8_t in[4] = {0}, out[8] = {9, 9, 9, 9, 9, 9, 9, 9};
        struct fused_infer call = small_call(in);
        struct fused_buffer *b = NULL;
        struct fused_result result;
        int r;

        if (wrongs[which].is_buffer) {
            r = fused_buffer_create(f, 4096, &b);
            assert_null(b);
        } else {
            call.output = fused_tensor_at(out, FUSED_FLOAT32, 2, (int64_t[]){1, 1});
            assert_int_equal(fused_submit(f, &call, NULL), 0);
            assert_int_equal(fused_next(f, -1, &result), 0);
            r = result.code;
            if (strcmp(wrongs[which].name, "answered twice") == 0) {
                assert_int_equal(r, 0);
                r = fused_ping(f);
            }
            assert_memory_equal(out + 4, "\x09\x09\x09\x09", 4);
        }
        if (r != -EPROTO)
            fail_msg("%s: %s", wrongs[which].name, fused_code_name(r));
        expect_text(f, wrongs[which].want);
        assert_int_equal(fused_ping(f), -EPROTO);
        stop(f);
        if (open_fds() != before)
            fail_msg("%s: %u descriptors, %u before", wrongs[which].name, open_fds(), before);
    }
}

/* A result in another place than the request's buffer. */
static void script_wrong_place(struct server *s)
{
    struct proto_reply reply = {.has_id = true, .verb = VERB_INFER};

    server_hello(s);
    CHECK(server_read(s));
    server_answer(s);
    CHECK(server_read(s));
    reply.id = s->request.id;
    reply.infer.output = s->request.infer.output;
    if (which == 0)
        reply.infer.output.buffer++;
    else if (which == 1)
        reply.infer.output.offset++;
    else if (which == 2)
        reply.infer.output.shape[0]++;
    else
        reply.infer.output = (struct proto_tensor){.dtype = PROTO_FLOAT32,
                                                   .rank = 2,
                                                   .shape = {1, 1},
                                                   .is_inline = true,
                                                   .bytes = (const uint8_t *)"abcd",
                                                   .n_bytes = 4};
    server_write(s, &reply, -1);
    while (server_read(s))
        ;
}

static void test_wrong_place(void **state)
{
    (void)state;
    for (which = 0; which < 4; which++) {
        struct fused *f = start(script_wrong_place);
        uint8_t in[4] = {0};
        struct fused_infer call = small_call(in);
        struct fused_buffer *b;
        struct fused_result result;

        assert_int_equal(fused_buffer_create(f, 4096, &b), 0);
        call.output = fused_tensor_in(b, 64, FUSED_FLOAT32, 2, (int64_t[]){1, 1});
        assert_int_equal(fused_run(f, &call, &result), -EPROTO);
        expect_text(f, "not where it was to go");
        fused_buffer_free(b);
        stop(f);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_wrong_servers),
        cmocka_unit_test(test_wrong_place),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
