/*
 * pages.h - large zeroed memory, and how much of it there is
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

/* Whole pages, zeroed, of huge pages where the system has them. NULL: no memory. `size` of
 * pages_free() is that of the allocation; a NULL pointer is fine. */
void *pages_alloc(size_t size);
void *pages_free(void *pages, size_t size);

/* What can be allocated without pushing out what is in use; UINT64_MAX when that is not known. */
uint64_t pages_available(void);
