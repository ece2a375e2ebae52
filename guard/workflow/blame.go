package workflow

// blame is what errors say of one node.
type blame struct {
	others    bool // an agent's error refers to it
	own       int  // when the gateway's last error of it was recorded; -1 is never
	worst     string
	escalated bool // a human was told
}

func (b *blame) add(more blame) {
	b.others = b.others || more.others
	b.own = max(b.own, more.own)
	b.worst = worse(b.worst, more.worst)
	b.escalated = b.escalated || more.escalated
}

// errors tells every node of the errors that refer to it as a parent, or to its
// checkpoint (ATD and AERR, "Error ECT").
func (d *derivation) errors() {
	for i := range d.nodes {
		e := &d.nodes[i]
		if e.Event != Error || e.Own && e.Attempt || e.Stranger {
			continue
		}
		found := blame{others: !e.Own, own: -1, worst: e.Severity, escalated: e.Escalated}
		if e.Own {
			found.own = d.seq[i]
		}
		for _, p := range d.culprits(i) {
			d.blame(p, found)
		}
		if c, ok := d.index[e.CheckpointID]; ok && d.nodes[c].isCheckpoint() {
			d.blame(c, found)
		}
	}
	// A checkpoint was made for settlements and tasks, and a settlement is of a task.
	for _, of := range []func(*Node) bool{(*Node).isCheckpoint, (*Node).settlement} {
		for i := range d.nodes {
			if !of(&d.nodes[i]) {
				continue
			}
			for _, subject := range d.subjects(i) {
				if subject != i {
					d.blame(subject, d.history[i].blame)
				}
			}
		}
	}
	for i := range d.nodes {
		d.nodes[i].Worst = d.history[i].blame.worst
	}
}

func (d *derivation) blame(node int, found blame) {
	if d.nodes[node].task() || d.nodes[node].isCheckpoint() {
		d.history[node].blame.add(found)
	}
}

// failed reports whether an error stands. The gateway's own is about one call: a later
// call, or a settlement of the doubt, answers it. What others say stands.
func (h *history) failed() bool {
	answered := h.claimed
	if h.outcome == Completed {
		answered = max(answered, h.settled)
	}
	return h.blame.others || h.blame.own > answered
}
