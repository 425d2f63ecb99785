/*
 * codec.h - messages to and from msgpack
 *
 * codec.c, which decodes and packs, is the only file that includes msgpack-c; encode.c lays
 * messages out. Nothing is unpacked before codec_check() has walked the raw bytes: depth, counts
 * against the bytes that remain, the number of elements, no trailing bytes.
 */
#pragma once

#include "proto.h"

/* 0, or -EBADMSG with *ret_reason set to a fixed string. Never allocates, never recurses. */
int codec_check(const uint8_t *bytes, size_t n, const char **ret_reason);

/* Scratch space of a decoder: made once per connection, reused for every message. free accepts NULL
 * and returns NULL. */
struct codec;
struct codec *codec_new(void);
struct codec *codec_free(struct codec *codec);

/*
 * Decodes one datagram. 0, or -EBADMSG (reason set; *ret_has_id and *ret_id are filled as far as an
 * id could be read, so that the answer can carry it), or -ENOMEM. Every field is range-checked:
 * enumerations are in their lists, ranks within PROTO_RANK_MAX, sizes not negative, inline bytes
 * within PROTO_INLINE_MAX, names not empty, valid UTF-8 and without control characters. A verb that
 * is not in the list is -EBADMSG with reason "unknown verb".
 */
int codec_decode_request(struct codec *codec, const uint8_t *bytes, size_t n,
                         struct proto_request *ret, bool *ret_has_id, uint64_t *ret_id,
                         const char **ret_reason);
int codec_decode_reply(struct codec *codec, const uint8_t *bytes, size_t n, struct proto_reply *ret,
                       const char **ret_reason);

/*
 * Encode into a caller's space of `size` bytes. The number of bytes; -EMSGSIZE when they do not
 * fit, or when a reply's document breaks the limits that codec_check() keeps; -EINVAL for a record
 * that is none (a verb, dtype, rank or error out of its list). What an error text may not hold (see
 * proto_text_length()) is replaced by '?', and it is cut to PROTO_TEXT_MAX.
 */
int codec_encode_request(const struct proto_request *request, uint8_t *bytes, size_t size);
int codec_encode_reply(const struct proto_reply *reply, uint8_t *bytes, size_t size);

/*
 * A document written piece by piece into a caller's space. The first failure sticks (-EMSGSIZE, or
 * -EINVAL for a count that was announced and not kept) and later calls do nothing; doc_finish()
 * returns it, or the number of bytes. Non-finite doubles are written as they are; codec_json()
 * prints them as strings.
 */
struct doc {
    uint8_t *bytes;
    size_t size, used;
    int error;
    unsigned depth;
    uint32_t open[PROTO_DEPTH_MAX]; /* values still owed to each open container */
};
void doc_init(struct doc *doc, uint8_t *bytes, size_t size);
void doc_map(struct doc *doc,
             uint32_t n_pairs); /* followed by that many keys, each with its value */
void doc_list(struct doc *doc, uint32_t n);
void doc_key(struct doc *doc, const char *key);
void doc_str(struct doc *doc, const char *s);
void doc_str_n(struct doc *doc, const char *s, size_t n);
void doc_bin(struct doc *doc, const void *bytes, size_t n);
void doc_raw(struct doc *doc, const uint8_t *bytes, size_t n); /* one value, encoded before */
void doc_uint(struct doc *doc, uint64_t v);
void doc_int(struct doc *doc, int64_t v);
void doc_double(struct doc *doc, double v);
void doc_bool(struct doc *doc, bool v);
void doc_nil(struct doc *doc);
int doc_finish(struct doc *doc);

/* A document as JSON text, NUL-terminated, to be freed by the caller. 0, -EBADMSG or -ENOMEM. */
int codec_json(const uint8_t *bytes, size_t n, char **ret_json);
