/*
 * test_protocol_md.c - PROTOCOL.md names everything that the headers know, and its bytes say what
 * it says they say
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "proto/codec.h"
#include "proto/keys.h"

static char page[1 << 20];

static int load_page(void **state)
{
    FILE *file = fopen("proto/PROTOCOL.md", "r");
    size_t n;

    (void)state;
    if (!file) {
        print_error("run from the top of the tree\n");
        return -1;
    }
    n = fread(page, 1, sizeof page - 1, file);
    page[n] = 0;
    fclose(file);
    return n > 0 ? 0 : -1;
}

__attribute__((format(printf, 1, 2))) static void expect_named(const char *format, ...)
{
    char text[256];
    va_list ap;

    va_start(ap, format);
    vsnprintf(text, sizeof text, format, ap);
    va_end(ap);
    if (!strstr(page, text))
        fail_msg("PROTOCOL.md does not say \"%s\"", text);
}

static void test_lists(void **state)
{
    (void)state;
    for (unsigned verb = 0; verb < VERB_COUNT; verb++)
        expect_named("\n### %s%s\n", proto_verb_name((enum verb)verb),
                     proto_verb_right((enum verb)verb) == RIGHT_ADMIN ? " (admin)" : "");
#define X(number, NAME, text) expect_named("\n| %d | %s | ", number, #NAME);
    PROTO_ERRORS(X)
#undef X
#define X(number, NAME, name, size) expect_named("`%s`", name);
    PROTO_DTYPES(X)
#undef X
#define X(KEY, key, want) expect_named("`%s`", key);
    KEYS(X)
#undef X
}

static void test_limits(void **state)
{
    (void)state;
    expect_named("version %d", PROTO_VERSION_MAX);
    expect_named("at most %u bytes, with at most one file descriptor", PROTO_DATAGRAM_MAX);
    expect_named("most %u deep, at most %u elements", PROTO_DEPTH_MAX, PROTO_ELEMENTS_MAX);
    expect_named("at most %u keys", PROTO_KEYS_MAX);
    expect_named("1 to %u bytes, valid UTF-8", PROTO_NAME_MAX);
    expect_named("at most %u bytes, one line", PROTO_TEXT_MAX);
    expect_named("at most %u sizes", PROTO_RANK_MAX);
    expect_named("at most %u bytes, exactly the shape's", PROTO_INLINE_MAX);
    expect_named("at most %u, each", PROTO_LIST_MAX);
    expect_named("After %u datagrams", PROTO_BAD_MESSAGES_MAX);
    expect_named("at most %u answers wait, of %u bytes together", PROTO_UNREAD_MAX,
                 PROTO_UNREAD_BYTES_MAX);
    expect_named("Of answers with a descriptor %u are sent", PROTO_UNREAD_FDS_MAX);
    expect_named("uint, 0 to %u | %u", PROTO_PRIORITY_MAX, PROTO_PRIORITY_DEFAULT);
    expect_named("`%s`", PROTO_SOCKET_DEFAULT);
}

/* Lines of hexadecimal digits up to one that is none. The number of bytes. */
static size_t read_hex(const char **line, uint8_t *to, size_t size)
{
    const char *s = *line;
    size_t n = 0;

    while (strspn(s, "0123456789abcdef") == 2) {
        assert_in_range(n, 0, size - 1);
        to[n++] = (uint8_t)strtoul(s, NULL, 16);
        s += 3;
    }
    *line = s;
    return n;
}

static void check_message(char direction, const char *json, const uint8_t *bytes, size_t n)
{
    struct codec *codec = codec_new();
    static uint8_t again[4096];
    struct proto_request request;
    struct proto_reply reply;
    const char *reason;
    char *printed;
    uint64_t id;
    bool has_id;
    int r;

    assert_non_null(codec);
    assert_int_equal(codec_json(bytes, n, &printed), 0);
    assert_string_equal(printed, json);
    free(printed);
    if (direction == '>') {
        r = codec_decode_request(codec, bytes, n, &request, &has_id, &id, &reason);
        if (r == 0)
            r = codec_encode_request(&request, again, sizeof again);
    } else {
        r = codec_decode_reply(codec, bytes, n, &reply, &reason);
        if (r == 0)
            r = codec_encode_reply(&reply, again, sizeof again);
    }
    if (r != (int)n)
        fail_msg("%s: %d bytes, the page has %zu", json, r, n);
    assert_memory_equal(again, bytes, n);
    codec_free(codec);
}

static void test_exchange(void **state)
{
    unsigned n_messages = 0;
    const char *s = page;

    (void)state;
    while ((s = strstr(s, "\n```hex\n"))) {
        s += 8;
        while (*s == '>' || *s == '<') {
            static char json[2048];
            static uint8_t bytes[2048];
            char direction = *s;
            size_t n_json = strcspn(s + 2, "\n"), n;

            assert_in_range(n_json, 1, sizeof json - 1);
            memcpy(json, s + 2, n_json);
            json[n_json] = 0;
            s += 2 + n_json + 1;
            n = read_hex(&s, bytes, sizeof bytes);
            assert_true(n > 0);
            check_message(direction, json, bytes, n);
            n_messages++;
        }
        assert_memory_equal(s, "```", 3);
    }
    assert_int_equal(n_messages, 13);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_lists),
        cmocka_unit_test(test_limits),
        cmocka_unit_test(test_exchange),
    };

    return cmocka_run_group_tests(tests, load_page, NULL);
}
