/*
 * test_models.c - loading, swapping and unloading under a running daemon
 */
#include "daemon.h"

static struct daemon d;
static struct client c;
static float x[A_ROWS * A_IN];

static int start(void **state)
{
    (void)state;
    golden_read(MODEL_A, "x", x, sizeof(x));
    daemon_start(&d, NULL, NULL);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    daemon_stop(&d);
    return 0;
}

HELPER void call(struct proto_reply *reply, enum verb verb, const char *name)
{
    struct proto_request request = {.verb = verb, .model.name = str(name)};

    client_call(&c, &request, -1, reply, NULL);
}

/* The answer as JSON; lives until the next call. */
HELPER const char *json(const struct proto_reply *reply)
{
    static char *text;

    assert_ok(reply);
    free(text);
    text = NULL;
    assert_int_equal(codec_json(reply->document.bytes, reply->document.n_bytes, &text), 0);
    return text;
}

#define assert_has(reply, words)                              \
    do {                                                      \
        const char *has_text = json(reply);                   \
        if (!strstr(has_text, words))                         \
            fail_msg("\"%s\" is not in %s", words, has_text); \
    } while (0)

HELPER void assert_text(const struct proto_reply *reply, const char *text)
{
    if (reply->text.n != strlen(text) || memcmp(reply->text.s, text, reply->text.n) != 0)
        fail_msg("\"%.*s\", not \"%s\"", (int)reply->text.n, reply->text.s, text);
}

HELPER void write_model(const struct daemon *daemon, const char *file, const char *text)
{
    char path[300];

    snprintf(path, sizeof(path), "%s/%s.conf", daemon->models, file);
    write_file(path, text);
}

static const char clamp_model[] =
    "name = \"%s\"; dtype = \"float32\"; input = { shape = [ 4 ]; };\n"
    "stages = ( { op = \"clamp\"; min = 0.0; max = %s; } );\n";

HELPER void add_clamp(const struct daemon *daemon, const char *file, const char *name,
                      const char *max)
{
    char text[400];

    snprintf(text, sizeof(text), clamp_model, name, max);
    write_model(daemon, file, text);
}

HELPER void remove_model(const struct daemon *daemon, const char *file)
{
    char path[300];

    snprintf(path, sizeof(path), "%s/%s.conf", daemon->models, file);
    assert_int_equal(unlink(path), 0);
}

/* What clamp makes of 5. */
HELPER float clamp_of_five(void)
{
    static const float five[4] = {5, 5, 5, 5};
    struct proto_request request = {.verb = VERB_INFER,
                                    .infer = {.model = str("clamp"),
                                              .input = {.dtype = PROTO_FLOAT32,
                                                        .rank = 2,
                                                        .shape = {1, 4},
                                                        .is_inline = true,
                                                        .bytes = (const uint8_t *)five,
                                                        .n_bytes = sizeof(five)},
                                              .priority = 1}};
    struct proto_reply reply;
    float got;

    client_call(&c, &request, -1, &reply, NULL);
    assert_ok(&reply);
    memcpy(&got, reply.infer.output.bytes, sizeof(got));
    return got;
}

static void describes_itself(void **state)
{
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    call(&reply, VERB_STATUS, "");
    assert_has(&reply, "\"state\":\"ready\"");
    assert_has(&reply, "\"models\":4");
    assert_has(&reply, "\"uids\":[");
    /* the request that asks is not one that waits */
    assert_null(strstr(json(&reply), "\"requests\":1"));
    assert_has(&reply, "\"requests\":0");
    call(&reply, VERB_MODEL_LIST, "");
    assert_has(&reply, MODEL_A);
    assert_has(&reply, "\"more\":false");
    call(&reply, VERB_MODEL_DESCRIBE, MODEL_A);
    assert_has(&reply, "\"input\":[null,64]");
    assert_has(&reply, "\"output\":[1,128,null,1]");
    assert_has(&reply, "\"compact\":\"outer_sum\"");
    call(&reply, VERB_MODEL_DESCRIBE, MODEL_B);
    assert_has(&reply, "\"compact\":\"constant\"");
    call(&reply, VERB_MODEL_DESCRIBE, "nobody");
    assert_error(&reply, ERR_NOT_FOUND);
    call(&reply, VERB_STATS, "nobody");
    assert_error(&reply, ERR_NOT_FOUND);
    client_close(&c);
}

static void counts(void **state)
{
    struct proto_request request = infer_a(x);
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    for (int i = 0; i < 3; i++) {
        request.id = 0;
        client_call(&c, &request, -1, &reply, NULL);
        assert_is_a(&reply);
    }
    request.infer.offset = 1;
    request.id = 0;
    client_call(&c, &request, -1, &reply, NULL);
    call(&reply, VERB_STATS, MODEL_A);
    assert_has(&reply, "\"requests\":4");
    assert_has(&reply, "\"rows\":24");
    assert_has(&reply, "\"errors\":{\"BAD_MESSAGE\":1}");
    assert_has(&reply, "\"queue_us\":{\"count\":3");
    call(&reply, VERB_STATS, "");
    assert_has(&reply, "\"model\":null");
    client_close(&c);
}

static void swaps_and_unloads(void **state)
{
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    add_clamp(&d, "clamp", "clamp", "1.0");
    call(&reply, VERB_MODEL_LOAD, "clamp");
    assert_has(&reply, "\"action\":\"loaded\"");
    assert_has(&reply, "\"load_ms\":");
    assert_true(clamp_of_five() == 1.0f);
    call(&reply, VERB_MODEL_LOAD, "clamp");
    assert_has(&reply, "\"action\":\"unchanged\"");
    assert_null(strstr(json(&reply), "load_ms"));
    add_clamp(&d, "clamp", "clamp", "2.0");
    call(&reply, VERB_MODEL_RELOAD, "clamp");
    assert_has(&reply, "\"action\":\"loaded\"");
    assert_true(clamp_of_five() == 2.0f);
    /* a bad file leaves what is served */
    write_model(&d, "clamp", "name = \"clamp\";\nnonsense = 1;\n");
    call(&reply, VERB_MODEL_RELOAD, "clamp");
    assert_error(&reply, ERR_BAD_MODEL);
    assert_non_null(memmem(reply.text.s, reply.text.n, "clamp.conf", 10));
    assert_true(clamp_of_five() == 2.0f);
    /* another name than its file's, asked for by name */
    add_clamp(&d, "clamp", "other", "3.0");
    call(&reply, VERB_MODEL_LOAD, "clamp");
    assert_error(&reply, ERR_BAD_MODEL);
    call(&reply, VERB_MODEL_UNLOAD, "clamp");
    assert_has(&reply, "\"action\":\"unloaded\"");
    call(&reply, VERB_MODEL_UNLOAD, "clamp");
    assert_error(&reply, ERR_NOT_FOUND);
    call(&reply, VERB_MODEL_RELOAD, "clamp");
    assert_error(&reply, ERR_NOT_FOUND);
    remove_model(&d, "clamp");
    client_close(&c);
    assert_healthy(&d);
}

/* All or nothing. */
static void reloads_the_folder(void **state)
{
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    add_clamp(&d, "clamp", "clamp", "1.0");
    add_clamp(&d, "also", "also", "1.0");
    call(&reply, VERB_MODEL_RELOAD, "");
    assert_has(&reply, "\"name\":\"clamp\",\"action\":\"loaded\"");
    /* one changed, one gone, one new, and one bad */
    add_clamp(&d, "clamp", "clamp", "2.0");
    remove_model(&d, "also");
    add_clamp(&d, "fresh", "fresh", "1.0");
    write_model(&d, "zz-bad", "name = \"bad\"; dtype = 5;\n");
    call(&reply, VERB_MODEL_RELOAD, "");
    assert_error(&reply, ERR_BAD_MODEL);
    assert_true(clamp_of_five() == 1.0f);
    call(&reply, VERB_MODEL_DESCRIBE, "also");
    assert_ok(&reply);
    call(&reply, VERB_MODEL_DESCRIBE, "fresh");
    assert_error(&reply, ERR_NOT_FOUND);
    /* two files of one name */
    add_clamp(&d, "zz-bad", "clamp", "1.0");
    call(&reply, VERB_MODEL_RELOAD, "");
    assert_error(&reply, ERR_BAD_MODEL);
    assert_text(&reply, "zz-bad.conf: name: \"clamp\" is the name of clamp.conf too");
    assert_true(clamp_of_five() == 1.0f);
    remove_model(&d, "zz-bad");
    call(&reply, VERB_MODEL_RELOAD, "");
    assert_has(&reply, "\"name\":\"also\",\"action\":\"unloaded\"");
    assert_true(clamp_of_five() == 2.0f);
    call(&reply, VERB_MODEL_DESCRIBE, "fresh");
    assert_ok(&reply);
    remove_model(&d, "clamp");
    remove_model(&d, "fresh");
    call(&reply, VERB_MODEL_RELOAD, "");
    assert_ok(&reply);
    client_close(&c);
    assert_healthy(&d);
}

static void reloads_on_sighup(void **state)
{
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    add_clamp(&d, "clamp", "clamp", "1.5");
    write_file(d.config, "log_level = \"debug\"; uid_buffers = 1;");
    kill(d.pid, SIGHUP);
    for (int i = 0; i < 400; i++) {
        call(&reply, VERB_MODEL_DESCRIBE, "clamp");
        if (reply.error == ERR_NONE)
            break;
        sleep_ms(5);
    }
    assert_true(clamp_of_five() == 1.5f);
    call(&reply, VERB_STATUS, "");
    assert_has(&reply, "\"log_level\":\"debug\"");
    /* a wrong file changes nothing */
    write_file(d.config, "log_level = 5;");
    remove_model(&d, "clamp");
    kill(d.pid, SIGHUP);
    sleep_ms(100);
    assert_true(clamp_of_five() == 1.5f);
    write_file(d.config, "");
    kill(d.pid, SIGHUP);
    for (int i = 0; i < 400; i++) {
        call(&reply, VERB_MODEL_DESCRIBE, "clamp");
        if (reply.error != ERR_NONE)
            break;
        sleep_ms(5);
    }
    assert_error(&reply, ERR_NOT_FOUND);
    client_close(&c);
    assert_healthy(&d);
}

/* The model is there, and wrong: not a name that nobody knows. */
static void misses_weights(void **state)
{
    static const char text[] = MODEL_A ".conf: " MODEL_A ".safetensors: No such file or directory";
    struct proto_reply reply;
    struct daemon one;
    char path[300];

    (void)state;
    daemon_prepare(&one);
    add_model(&one, MODEL_A);
    daemon_spawn(&one, NULL);
    daemon_wait_ready(&one);
    client_start(&c, &one);
    snprintf(path, sizeof(path), "%s/%s.safetensors", one.models, MODEL_A);
    assert_int_equal(unlink(path), 0);
    call(&reply, VERB_MODEL_RELOAD, "");
    assert_error(&reply, ERR_BAD_MODEL);
    assert_text(&reply, text);
    call(&reply, VERB_MODEL_LOAD, MODEL_A);
    assert_error(&reply, ERR_BAD_MODEL);
    assert_text(&reply, text);
    /* so is a folder that is gone: no path of the server's is told */
    remove_tree(one.models);
    call(&reply, VERB_MODEL_RELOAD, "");
    assert_error(&reply, ERR_BAD_MODEL);
    assert_text(&reply, "models_dir: No such file or directory");
    client_close(&c);
    daemon_stop(&one);
}

/* W-17 */
static void opens_nothing_outside(void **state)
{
    static const char *const names[] = {"..",          ".",  "/etc/passwd",  "a/../../b",
                                        "../" MODEL_A, ".x", "no-such-model"};
    struct proto_reply reply;

    (void)state;
    client_start(&c, &d);
    for (size_t i = 0; i < ARRAY_SIZE(names); i++) {
        call(&reply, VERB_MODEL_LOAD, names[i]);
        assert_error(&reply, ERR_NOT_FOUND);
        call(&reply, VERB_MODEL_UNLOAD, names[i]);
        assert_error(&reply, ERR_NOT_FOUND);
    }
    client_close(&c);
    assert_healthy(&d);
}

/* A file that holds a model of another name is that model's, loaded from it before or not. */
static void asks_for_a_model_by_its_name(void **state)
{
    struct proto_reply reply;
    struct daemon one;

    (void)state;
    daemon_prepare(&one);
    add_clamp(&one, "file", "inside", "1.0");
    daemon_spawn(&one, NULL);
    daemon_wait_ready(&one);
    client_start(&c, &one);
    call(&reply, VERB_MODEL_LOAD, "file");
    assert_error(&reply, ERR_BAD_MODEL);
    call(&reply, VERB_MODEL_LOAD, "inside");
    assert_ok(&reply);
    call(&reply, VERB_MODEL_UNLOAD, "inside");
    assert_ok(&reply);
    call(&reply, VERB_MODEL_LOAD, "file");
    assert_error(&reply, ERR_BAD_MODEL);
    client_close(&c);
    daemon_stop(&one);
}

static void pages_its_list(void **state)
{
    struct proto_request request = {.verb = VERB_MODEL_LIST};
    struct proto_reply reply;
    struct daemon many;

    (void)state;
    daemon_prepare(&many);
    for (int i = 0; i < 300; i++) {
        char name[30];

        snprintf(name, sizeof(name), "m%03d", i);
        add_clamp(&many, name, name, "1.0");
    }
    daemon_spawn(&many, NULL);
    daemon_wait_ready(&many);
    client_start(&c, &many);
    client_call(&c, &request, -1, &reply, NULL);
    assert_has(&reply, "\"more\":true");
    assert_has(&reply, "m255");
    assert_null(strstr(json(&reply), "m256"));
    request.id = 0;
    request.model_list.after = str("m255");
    client_call(&c, &request, -1, &reply, NULL);
    assert_has(&reply, "\"more\":false");
    assert_has(&reply, "m256");
    assert_has(&reply, "m299");
    request.id = 0;
    request.model_list.after = str("zzz");
    client_call(&c, &request, -1, &reply, NULL);
    assert_has(&reply, "\"models\":[]");
    client_close(&c);
    daemon_stop(&many);
}

/* Requests keep the version that they were checked against; it is unloaded after the last. */
static void swaps_under_load(void **state)
{
    enum { N = 30 };
    struct proto_request request = infer_a(x),
                         unload = {.verb = VERB_MODEL_UNLOAD, .model.name = str(MODEL_A)};
    struct proto_reply reply;
    struct daemon slow;
    unsigned n_right = 0;

    (void)state;
    daemon_start(&slow, "delay_ms=40", NULL);
    client_start(&c, &slow);
    for (int i = 0; i < N; i++) {
        request.id = 0;
        client_send(&c, &request, -1);
    }
    client_send(&c, &unload, -1);
    for (int i = 0; i < N + 1; i++) {
        assert_true(client_recv(&c, &reply, NULL));
        if (reply.verb == VERB_INFER) {
            assert_is_a(&reply);
            n_right++;
        }
    }
    assert_int_equal(n_right, N);
    request.id = 0;
    client_call(&c, &request, -1, &reply, NULL);
    assert_error(&reply, ERR_NOT_FOUND);
    call(&reply, VERB_MODEL_LOAD, MODEL_A);
    assert_ok(&reply);
    client_close(&c);
    assert_healthy(&slow);
    daemon_stop(&slow);
}

static void serves_while_it_loads(void **state)
{
    struct proto_request request = infer_a(x),
                         load = {.verb = VERB_MODEL_LOAD, .model.name = str("clamp")};
    struct proto_reply reply;
    struct daemon slow;
    double begin;

    (void)state;
    daemon_prepare(&slow);
    add_model(&slow, MODEL_A);
    daemon_spawn(&slow, "load_ms=300");
    daemon_wait_ready(&slow);
    add_clamp(&slow, "clamp", "clamp", "1.0");
    client_start(&c, &slow);
    client_send(&c, &load, -1);
    begin = now_s();
    client_call(&c, &request, -1, &reply, NULL);
    assert_is_a(&reply);
    assert_true(now_s() - begin < 0.25);
    assert_true(client_recv(&c, &reply, NULL));
    assert_has(&reply, "\"action\":\"loaded\"");
    /* the client goes while its model loads */
    load.id = 0;
    add_clamp(&slow, "clamp", "clamp", "2.0");
    client_send(&c, &load, -1);
    client_close(&c);
    sleep_ms(600);
    client_start(&c, &slow);
    assert_true(clamp_of_five() == 2.0f);
    client_close(&c);
    assert_healthy(&slow);
    daemon_stop(&slow);
}

static void refuses_what_does_not_fit(void **state)
{
    struct proto_reply reply;
    struct daemon small;

    (void)state;
    daemon_prepare(&small);
    daemon_spawn(&small, "oom_load_over=1000");
    daemon_wait_ready(&small); /* no model at all is fine */
    client_start(&c, &small);
    call(&reply, VERB_MODEL_LIST, "");
    assert_has(&reply, "\"models\":[]");
    add_model(&small, MODEL_A);
    call(&reply, VERB_MODEL_LOAD, MODEL_A);
    assert_error(&reply, ERR_NO_MEMORY);
    client_close(&c);
    daemon_stop(&small);
}

/* W-16, in small: every tenth file is bad, and every answer is of the last good one. */
static void reloads_often_under_traffic(void **state)
{
    static struct client admin;
    struct proto_reply reply;
    float good = 1;

    (void)state;
    client_start(&c, &d);
    client_start(&admin, &d);
    add_clamp(&d, "clamp", "clamp", "1");
    call(&reply, VERB_MODEL_LOAD, "clamp");
    assert_ok(&reply);
    for (int i = 2; i < 80; i++) {
        struct proto_request request = {.verb = VERB_MODEL_RELOAD, .model.name = str("clamp")};
        char max[20];

        snprintf(max, sizeof(max), i % 10 == 0 ? "x" : "%.9g", 1.0 + i / 64.0);
        add_clamp(&d, "clamp", "clamp", max);
        client_send(&admin, &request, -1);
        while (!client_readable(&admin, 0)) {
            float got = clamp_of_five();

            assert_true(got == good || got == 1.0f + (float)i / 64.0f);
        }
        assert_true(client_recv(&admin, &reply, NULL));
        if (i % 10 == 0) {
            assert_error(&reply, ERR_BAD_MODEL);
        } else {
            assert_ok(&reply);
            good = 1.0f + (float)i / 64.0f;
        }
        assert_true(clamp_of_five() == good);
    }
    remove_model(&d, "clamp");
    call(&reply, VERB_MODEL_UNLOAD, "clamp");
    assert_ok(&reply);
    client_close(&admin);
    client_close(&c);
    assert_healthy(&d);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(describes_itself),
        cmocka_unit_test(counts),
        cmocka_unit_test(swaps_and_unloads),
        cmocka_unit_test(reloads_the_folder),
        cmocka_unit_test(reloads_on_sighup),
        cmocka_unit_test(reloads_often_under_traffic),
        cmocka_unit_test(misses_weights),
        cmocka_unit_test(opens_nothing_outside),
        cmocka_unit_test(asks_for_a_model_by_its_name),

        cmocka_unit_test(pages_its_list),
        cmocka_unit_test(swaps_under_load),
        cmocka_unit_test(serves_while_it_loads),
        cmocka_unit_test(refuses_what_does_not_fit),
    };

    return cmocka_run_group_tests(tests, start, stop);
}
