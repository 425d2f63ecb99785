/*
 * replay.c - a fuzz target without a fuzzer: every input of its corpus once
 *
 * So that what fuzzing found stays found where there is no clang. The name of the program says the
 * corpus, "fuzz_codec" reads tests/fuzz/corpus/codec.
 */
#include <dirent.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int replay(const char *path)
{
    static uint8_t bytes[1 << 20];
    FILE *file = fopen(path, "re");
    uint8_t *copy;
    size_t n;

    if (!file) {
        perror(path);
        return 1;
    }
    n = fread(bytes, 1, sizeof(bytes), file);
    fclose(file);
    /* exactly as large as the input, so that a sanitizer sees a byte too far */
    copy = malloc(n ? n : 1);
    if (!copy)
        return 1;
    memcpy(copy, bytes, n);
    LLVMFuzzerTestOneInput(copy, n);
    free(copy);
    return 0;
}

int main(int argc, char **argv)
{
    const char *noun = strstr(argv[0], "fuzz_");
    struct dirent *entry;
    unsigned n = 0;
    char path[600];
    DIR *dir;

    (void)argc;
    while (noun && strstr(noun + 1, "fuzz_"))
        noun = strstr(noun + 1, "fuzz_");
    snprintf(path, sizeof(path), "tests/fuzz/corpus/%s", noun ? noun + 5 : "");
    dir = opendir(path);
    if (!dir) {
        perror(path);
        return 1;
    }
    while ((entry = readdir(dir))) {
        char file[900];

        if (entry->d_name[0] == '.')
            continue;
        snprintf(file, sizeof(file), "%s/%s", path, entry->d_name);
        if (replay(file) != 0)
            return 1;
        n++;
    }
    closedir(dir);
    printf("%u inputs\n", n);
    return n > 0 ? 0 : 1;
}
