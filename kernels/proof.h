/*
 * proof.h - what is known of a pipeline's result before anything is computed
 */
#pragma once

#include "pipeline.h"

/* Fills pipeline->proof; reads the weights that it needs. -EIO, -ENOMEM. */
int proof_make(struct pipeline *pipeline, bool prove, struct report *report);
