/*
 * fault.h - makes the n-th system call or allocation of a test fail
 *
 * Linked into fault_*.c only, with every function of WRAP and the area's own (tests/tests.mk)
 * wrapped. Only calls of the thread that armed count and fail; libraries outside the tree are not
 * touched.
 *
 *     for (unsigned n = 1;; n++) {
 *         fault_arm(n);
 *         r = what_is_tested();
 *         if (fault_disarm() < n)
 *             break;              // every call has had its turn
 *         ... r tells of the failure, nothing leaked ...
 *     }
 */
#pragma once

/* The n-th wrapped call from now on (from 1) fails, once: allocations and mappings with ENOMEM,
 * calls that make a descriptor with EMFILE, all others with EIO. */
void fault_arm(unsigned n);
/* The same with an error of your choice, as EINTR. With FAULT_SHORT a pread() gives half of what it
 * could. */
#define FAULT_SHORT (-1)
void fault_arm_with(unsigned n, int error);

/* The same for every thread but this one: the n-th call of all of them together. */
void fault_arm_others(unsigned n);
unsigned fault_disarm_others(void);

/* Wrapped calls of this thread since fault_arm(). */
unsigned fault_count(void);

/* Nothing fails any more. Returns the count. */
unsigned fault_disarm(void);

/* Open descriptors of this process. */
unsigned fault_open_fds(void);
