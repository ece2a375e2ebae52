package plan

// Unbounded makes a plan of as many nodes as there are, and tells how many links were
// followed for it.
func Unbounded(nodes []Node, r Request) (*Plan, int, error) {
	g, err := build("w", nodes)
	if err != nil {
		return nil, 0, err
	}
	d := &draft{Graph: g, Request: r}
	p, err := d.plan()
	return p, d.looked, err
}
