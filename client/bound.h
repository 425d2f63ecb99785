/*
 * bound.h - how fast this machine moves bytes, whoever serves
 */
#pragma once

/* Bytes a second, read and written together, that one thread copies from memory to memory; 0 when
 * there is no memory to try it with. Takes some milliseconds. */
double bound_memory(void);
