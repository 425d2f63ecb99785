/*
 * document.h - the answers that are documents: who we are, how we are, what is served
 */
#pragma once

#include <stddef.h>
#include <stdint.h>

#include "conn.h"
#include "proto/codec.h"
#include "registry.h"
#include "stats.h"

struct server;

void document_empty(struct doc *doc);
void document_hello(struct doc *doc, const struct conn *conn);
void document_status(struct doc *doc, const struct conn *conn);
void document_list(struct doc *doc, const struct registry *registry, const char *after, size_t n);
void document_describe(struct doc *doc, const struct server *server, const struct served *served);
/* `name` NULL: the daemon. */
void document_stats(struct doc *doc, const char *name, const struct stats *stats);
void document_changes(struct doc *doc, const struct registry_job *job);
