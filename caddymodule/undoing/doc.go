// Package undoing is the configuration of how guarded calls are undone, and what it
// says of one call before that leaves: whether its effect can be put back, what of the
// call has to be recorded for it, and the words of it that are recorded (DESIGN,
// "Checkpoints and rollback").
package undoing
