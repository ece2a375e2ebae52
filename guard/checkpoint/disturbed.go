package checkpoint

import "context"

// Disturbed reports that the result of a call says ReasonChanged, for the checkpoint of a
// further attempt of that call. The errors are those of Before.
func (v *Vault) Disturbed(ctx context.Context, id string) (bool, error) {
	n := v.name(id)
	at, _, err := v.part(ctx, n, kindResult)
	if err != nil || at == nil || at.released {
		return false, err
	}
	r, err := v.result(ctx, n, at, [32]byte{})
	return r != nil && r.Reason == ReasonChanged, err
}
