/*
 * fuzz_safetensors.c - any bytes: tensors that cover the data exactly and can be read, or a reason
 */
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "kernels/safetensors.h"

static void check(int holds)
{
    if (!holds)
        abort();
}

static void check_file(const struct safetensors *file, const uint8_t *data, size_t size)
{
    struct report report;
    uint64_t header, at;

    memcpy(&header, data, 8);
    at = 8 + header;
    check(at <= size);
    for (size_t i = 0; i < safetensors_count(file); i++) {
        const struct st_tensor *tensor = safetensors_at(file, i);
        uint64_t elements = 1;
        uint8_t *bytes;

        check(tensor->offset == at && tensor->size <= size - at);
        check(tensor->rank >= 0 && tensor->rank <= TENSOR_RANK_MAX);
        for (int k = 0; k < tensor->rank; k++)
            check(!__builtin_mul_overflow(elements, (uint64_t)tensor->dims[k], &elements));
        check((int64_t)elements == tensor->elements);
        check(elements * tensor->element_bytes == tensor->size);
        check(safetensors_find(file, tensor->name) == tensor);
        bytes = malloc(tensor->size + 1);
        check(bytes != NULL);
        check(safetensors_read(file, tensor, 0, tensor->elements, bytes, &report) == 0);
        check(memcmp(bytes, data + at, tensor->size) == 0);
        free(bytes);
        at += tensor->size;
    }
    check(at == size);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size)
{
    int fd = memfd_create("fuzz", MFD_CLOEXEC), r;
    struct report report = {""};
    struct safetensors *file;
    char path[32];

    check(fd >= 0);
    check(write(fd, data, size) == (ssize_t)size);
    snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
    r = safetensors_open(AT_FDCWD, path, &file, &report);
    close(fd);
    if (r == 0) {
        check_file(file, data, size);
        safetensors_free(file);
    } else {
        check(report.text[0] != 0 && strlen(report.text) < sizeof(report.text));
        for (const char *c = report.text; *c; c++)
            check((unsigned char)*c >= 0x20 && *c != 0x7f);
    }
    return 0;
}
