/*
 * sha256.h - SHA-256 (FIPS 180-4), for tests that compare large data with a recorded digest
 *
 * The constants are the first 32 bits of the fractional parts of cube roots (and, for the start,
 * square roots) of the first primes; they are computed from that definition.
 */
#pragma once

#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

struct sha256 {
    uint32_t state[8], constants[64];
    uint64_t bytes;
    uint8_t block[64];
};

static inline uint32_t sha256_fraction(long double root)
{
    return (uint32_t)((root - floorl(root)) * 0x1p32L);
}

static inline void sha256_init(struct sha256 *sha)
{
    int n = 0;

    sha->bytes = 0;
    for (int p = 2; n < 64; p++) {
        bool prime = true;

        for (int d = 2; d * d <= p; d++)
            prime &= p % d != 0;
        if (!prime)
            continue;
        if (n < 8)
            sha->state[n] = sha256_fraction(sqrtl(p));
        sha->constants[n++] = sha256_fraction(cbrtl(p));
    }
}

static inline uint32_t sha256_rotate(uint32_t x, int n)
{
    return x >> n | x << (32 - n);
}

static inline void sha256_block(struct sha256 *sha, const uint8_t *block)
{
    uint32_t w[64], s[8];

    for (int i = 0; i < 16; i++)
        w[i] = (uint32_t)block[4 * i] << 24 | (uint32_t)block[4 * i + 1] << 16 |
               (uint32_t)block[4 * i + 2] << 8 | block[4 * i + 3];
    for (int i = 16; i < 64; i++) {
        uint32_t a = w[i - 15], b = w[i - 2];

        w[i] = w[i - 16] + w[i - 7] + (sha256_rotate(a, 7) ^ sha256_rotate(a, 18) ^ a >> 3) +
               (sha256_rotate(b, 17) ^ sha256_rotate(b, 19) ^ b >> 10);
    }
    memcpy(s, sha->state, sizeof(s));
    for (int i = 0; i < 64; i++) {
        uint32_t e = s[4], a = s[0];
        uint32_t t1 = s[7] + (sha256_rotate(e, 6) ^ sha256_rotate(e, 11) ^ sha256_rotate(e, 25)) +
                      ((e & s[5]) ^ (~e & s[6])) + sha->constants[i] + w[i];
        uint32_t t2 = (sha256_rotate(a, 2) ^ sha256_rotate(a, 13) ^ sha256_rotate(a, 22)) +
                      ((a & s[1]) ^ (a & s[2]) ^ (s[1] & s[2]));

        memmove(s + 1, s, 7 * sizeof(s[0]));
        s[4] += t1;
        s[0] = t1 + t2;
    }
    for (int i = 0; i < 8; i++)
        sha->state[i] += s[i];
}

static inline void sha256_add(struct sha256 *sha, const uint8_t *data, size_t n)
{
    while (n > 0) {
        size_t at = sha->bytes % 64, take = n < 64 - at ? n : 64 - at;

        if (take == 64) {
            sha256_block(sha, data);
        } else {
            memcpy(sha->block + at, data, take);
            if (at + take == 64)
                sha256_block(sha, sha->block);
        }
        sha->bytes += take;
        data += take;
        n -= take;
    }
}

static inline void sha256_end(struct sha256 *sha, char hex[65])
{
    uint64_t bits = sha->bytes * 8;
    uint8_t byte = 0x80, length[8];

    do {
        sha256_add(sha, &byte, 1);
        byte = 0;
    } while (sha->bytes % 64 != 56);
    for (int i = 0; i < 8; i++)
        length[i] = (uint8_t)(bits >> (56 - 8 * i));
    sha256_add(sha, length, 8);
    for (int i = 0; i < 8; i++)
        snprintf(hex + 8 * i, 9, "%08x", sha->state[i]);
}
