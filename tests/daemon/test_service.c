/*
 * test_service.c - what a service manager hears, on a socket of our own, and what it may hand over
 */
#include "unit.h"

#include <fcntl.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include "daemon/service.h"

static int manager = -1;
static char path[64];

static int start(void **state)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};

    (void)state;
    snprintf(path, sizeof(path), "/tmp/fused-notify-%d", (int)getpid());
    snprintf(address.sun_path, sizeof(address.sun_path), "%s", path);
    manager = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    assert_int_equal(bind(manager, (struct sockaddr *)&address, sizeof(address)), 0);
    setenv("NOTIFY_SOCKET", path, 1);
    return 0;
}

static int stop(void **state)
{
    (void)state;
    close(manager);
    unlink(path);
    return 0;
}

static const char *heard(void)
{
    static char text[500];
    ssize_t n = recv(manager, text, sizeof(text) - 1, MSG_DONTWAIT);

    text[n > 0 ? n : 0] = '\0';
    return text;
}

static void tells_the_manager(void **state)
{
    (void)state;
    service_status("Loading");
    assert_string_equal(heard(), "STATUS=Loading");
    service_ready("Serving");
    assert_string_equal(heard(), "READY=1\nSTATUS=Serving");
    service_reloading();
    assert_non_null(strstr(heard(), "RELOADING=1\nMONOTONIC_USEC="));
    service_extend(5000000);
    assert_string_equal(heard(), "EXTEND_TIMEOUT_USEC=5000000");
    service_watchdog();
    assert_string_equal(heard(), "WATCHDOG=1");
    service_stopping("Ending");
    assert_string_equal(heard(), "STOPPING=1\nSTATUS=Ending");
}

static void says_nothing_without_one(void **state)
{
    (void)state;
    unsetenv("NOTIFY_SOCKET");
    service_ready("Serving");
    setenv("NOTIFY_SOCKET", path, 1);
    assert_string_equal(heard(), "");
}

static void knows_the_watchdog(void **state)
{
    char pid[20];

    (void)state;
    unsetenv("WATCHDOG_USEC");
    assert_int_equal(service_watchdog_interval_us(), 0);
    snprintf(pid, sizeof(pid), "%d", (int)getpid());
    setenv("WATCHDOG_PID", pid, 1);
    setenv("WATCHDOG_USEC", "3000000", 1);
    assert_int_equal(service_watchdog_interval_us(), 1500000);
    setenv("WATCHDOG_PID", "1", 1);
    assert_int_equal(service_watchdog_interval_us(), 0);
    unsetenv("WATCHDOG_USEC");
    unsetenv("WATCHDOG_PID");
}

/* In a child, whose descriptors are its own: 0 when the result is as expected. */
static int hand_over(int type, bool listening, const char *n_fds)
{
    pid_t child = fork();
    int status;

    assert_true(child >= 0);
    if (child == 0) {
        struct sockaddr_un address = {.sun_family = AF_UNIX};
        struct report report = {""};
        char pid[20];
        int fd = socket(AF_UNIX, type, 0), got = -1, r;

        bind(fd, (struct sockaddr *)&address, sizeof(sa_family_t));
        if (listening)
            listen(fd, 1);
        if (fd != 3) {
            dup2(fd, 3);
            close(fd);
        }
        dup2(3, 4);
        snprintf(pid, sizeof(pid), "%d", (int)getpid());
        setenv("LISTEN_PID", pid, 1);
        setenv("LISTEN_FDS", n_fds, 1);
        r = service_listen_fd(&got, &report);
        if (r == 0 && got == 3)
            _exit((fcntl(3, F_GETFD) & FD_CLOEXEC) && !getenv("LISTEN_FDS") ? 0 : 3);
        _exit(r < 0 && report.text[0] && got == -1 ? 1 : r == 0 && got == -1 ? 2 : 4);
    }
    assert_int_equal(waitpid(child, &status, 0), child);
    return WEXITSTATUS(status);
}

static void takes_one_listening_socket(void **state)
{
    (void)state;
    assert_int_equal(hand_over(SOCK_SEQPACKET, true, "1"), 0);
    assert_int_equal(hand_over(SOCK_SEQPACKET, true, "2"), 1);
    assert_int_equal(hand_over(SOCK_SEQPACKET, false, "1"), 1);
    assert_int_equal(hand_over(SOCK_STREAM, true, "1"), 1);
    assert_int_equal(hand_over(SOCK_DGRAM, false, "1"), 1);
    assert_int_equal(hand_over(SOCK_SEQPACKET, true, "x"), 1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(tells_the_manager),
        cmocka_unit_test(says_nothing_without_one),
        cmocka_unit_test(knows_the_watchdog),
        cmocka_unit_test(takes_one_listening_socket),
    };

    return cmocka_run_group_tests(tests, start, stop);
}
