/*
 * infer.h - from an infer message to a queued request
 */
#pragma once

#include "conn.h"
#include "proto/proto.h"

/* Checks the message against the model and the connection's buffers and queues it, or refuses it.
 */
void infer_start(struct conn *conn, const struct proto_request *message, uint64_t now_us);
