/*
 * fuzz_config.c - a configuration is taken whole and within every range, or not at all, with a
 * reason
 */
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "daemon/config.h"

static void check(int holds)
{
    if (!holds)
        abort();
}

static void check_path(const char *path, size_t room)
{
    check(memchr(path, 0, room) != NULL);
    check(path[0] == '/' && !strstr(path, "/../"));
}

/* libconfig 1.5 forgets the string that a syntax error follows. */
const char *__lsan_default_suppressions(void);

const char *__lsan_default_suppressions(void)
{
    return "leak:libconfig.so\n";
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    struct report report = {""};
    struct conf *conf = NULL;
    struct config config, untouched;
    int r;

    memset(&config, 0x5a, sizeof(config));
    untouched = config;
    r = conf_parse("fuzz.conf", (const char *)data, size, &conf, &report);
    if (r == 0)
        r = config_parse(conf, &config, &report);
    conf_free(conf);
    if (r != 0) {
        check(report.text[0] != 0);
        check(memcmp(&config, &untouched, sizeof(config)) == 0);
        return 0;
    }
    check_path(config.socket, CONFIG_SOCKET_MAX + 1);
    check_path(config.models_dir, sizeof(config.models_dir));
    check_path(config.weights_dir, sizeof(config.weights_dir));
    check(config.socket_mode <= 0777 && config.n_devices >= 1 &&
          config.n_devices <= BACKEND_DEVICES_MAX);
    check(config.cpu_threads <= 1024 && config.spin_us <= 1000000);
    check(config.uid_buffers <= 65536 && config.uid_requests >= 1 && config.uid_connections >= 1);
    check(config.hello_timeout_ms >= 10 && config.batch_timeout_ms >= 10);
    return 0;
}
