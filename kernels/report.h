/*
 * report.h - why something failed, in words for a person
 *
 * Functions return 0 or a negative errno, and say the reason in a report. The errno is the kind,
 * and the daemon maps it in one place: -EINVAL a model or file that is wrong, -ENOENT something
 * that is not there, -ENOMEM no host or device memory, -ENODEV no usable device, -EIO reading
 * failed, -ECANCELED stopped on request, -ENOTRECOVERABLE the device is lost.
 */
#pragma once

struct report {
    char text[400]; /* one line, no newline, never a directory or an address */
};

/* Writes the text (cut if too long) and returns r. `report` may be NULL. */
__attribute__((format(printf, 3, 4))) int report_set(struct report *report, int r,
                                                     const char *format, ...);

/* Puts words before what is there: "model.conf:12: " and the like. Returns r. */
__attribute__((format(printf, 3, 4))) int report_prefix(struct report *report, int r,
                                                        const char *format, ...);
