/*
 * verb.h - what each verb does
 */
#pragma once

#include "conn.h"
#include "proto/proto.h"

/* The client has said hello and may use the verb; the id is not in flight. *fd is the descriptor
 * that came along, or -1; a verb that keeps it takes it. */
void verb_dispatch(struct conn *conn, const struct proto_request *message, int *fd);
