/*
 * json.h - msgpack printed as JSON text
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/*
 * Text of one value, NUL-terminated, to be freed by the caller: strings escaped (bytes that are not
 * UTF-8 become U+FFFD), doubles in the shortest form that reads back the same, "NaN", "Infinity"
 * and "-Infinity" as strings, bin as a string of hexadecimal digits. The bytes have passed
 * codec_check(). 0, -EBADMSG for what JSON cannot say (ext, a key that is no string), or -ENOMEM.
 */
int json_text(const uint8_t *bytes, size_t n, char **ret_text);
