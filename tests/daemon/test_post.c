/*
 * test_post.c - letters by another thread: all arrive, in order, and what does not is said
 */
#include "unit.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/post.h"

static uv_loop_t loop;
static struct post *post;
static unsigned n_said, n_again, n_gone;

/* The owner of a letter is its number. */
static void said(void *owner, int result, const uint8_t *bytes, size_t n)
{
    uint32_t number;

    assert_int_equal((uintptr_t)owner, ++n_said);
    assert_true(n >= sizeof(number));
    memcpy(&number, bytes, sizeof(number));
    assert_int_equal(number, n_said);
    n_again += result == -EAGAIN;
    n_gone += result == -EPIPE;
    assert_true(result == 0 || result == -EAGAIN || result == -EPIPE);
}

static void begin(unsigned spin_us, int sockets[2])
{
    n_said = n_again = n_gone = 0;
    assert_int_equal(uv_loop_init(&loop), 0);
    assert_int_equal(post_new(&loop, spin_us, said, &post), 0);
    assert_int_equal(socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets),
                     0);
}

static void end(int sockets[2])
{
    post = post_free(post);
    uv_run(&loop, UV_RUN_DEFAULT);
    assert_int_equal(uv_loop_close(&loop), 0);
    close(sockets[0]);
    close(sockets[1]);
}

static bool put(int socket, uint32_t number, size_t n)
{
    uint8_t bytes[POST_LETTER_MAX + 1] = {0};

    memcpy(bytes, &number, sizeof(number));
    return post_put(post, socket, (void *)(uintptr_t)number, bytes, n);
}

static uint32_t take(int socket, size_t n)
{
    uint8_t bytes[POST_LETTER_MAX];
    uint32_t number;

    if (recv(socket, bytes, sizeof(bytes), 0) != (ssize_t)n)
        return 0;
    memcpy(&number, bytes, sizeof(number));
    return number;
}

/* More than the ring has room for, in batches of all sizes, awake and asleep. */
static void sends_in_order(void **state)
{
    static const unsigned spins[] = {0, 200};
    unsigned seed = 20261129;

    (void)state;
    for (unsigned round = 0; round < 2; round++) {
        uint32_t n_put = 0, n_taken = 0;
        int sockets[2];

        begin(spins[round], sockets);
        while (n_taken < 20000) {
            for (unsigned k = 1 + (unsigned)rand_r(&seed) % 64; k > 0; k--)
                n_put += put(sockets[0], n_put + 1, 100);
            post_go(post);
            if (rand_r(&seed) % 4 == 0)
                post_flush(post);
            uv_run(&loop, UV_RUN_NOWAIT);
            for (uint32_t number; (number = take(sockets[1], 100)) > 0;) {
                /* What the full socket did not take is missing. */
                assert_true(number > n_taken);
                n_taken = number;
            }
        }
        post_flush(post);
        assert_int_equal(n_said, n_put);
        print_message("%u letters, %u came back\n", n_put, n_again);
        end(sockets);
    }
}

static void says_what_was_not_taken(void **state)
{
    uint32_t n = 0, n_read = 0;
    int sockets[2];

    (void)state;
    begin(0, sockets);
    while (put(sockets[0], n + 1, POST_LETTER_MAX))
        n++;
    assert_int_equal(n, 1024);
    assert_int_equal(n_said, 0); /* nobody was told to send */
    post_flush(post);
    assert_int_equal(n_said, n);
    assert_in_range(n_again, 1, n - 1);
    while (take(sockets[1], POST_LETTER_MAX) > 0)
        n_read++;
    assert_int_equal(n_read, n - n_again);
    assert_false(put(sockets[0], n + 1, POST_LETTER_MAX + 1));
    close(sockets[1]);
    assert_true(put(sockets[0], n + 1, 4));
    post_flush(post);
    assert_int_equal(n_gone, 1);
    sockets[1] = -1;
    end(sockets);
}

static void ends_with_all_sent(void **state)
{
    int sockets[2];

    (void)state;
    begin(50, sockets);
    for (uint32_t number = 1; number <= 20; number++)
        assert_true(put(sockets[0], number, 100));
    post = post_free(post);
    assert_int_equal(n_said, 20);
    for (uint32_t number = 1; number <= 20; number++)
        assert_int_equal(take(sockets[1], 100), number);
    end(sockets);
    post_flush(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(sends_in_order),
        cmocka_unit_test(says_what_was_not_taken),
        cmocka_unit_test(ends_with_all_sent),
    };

    return cmocka_run_group_tests(tests, NULL, NULL);
}
