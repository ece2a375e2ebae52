package admin

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"strings"

	"github.com/google/uuid"

	"github.com/agent-guard/caddy-agent-guard/guard"
	"github.com/agent-guard/caddy-agent-guard/guard/checkpoint"
	"github.com/agent-guard/caddy-agent-guard/guard/rollback/undo"
)

// maxSought is how many pages are looked through for an execution that no index names.
// A page opens a few thousand records.
const maxSought = 20

// find is the key of the execution that an operator names: by the key or its first digits,
// by the checkpoint of its call, or by the caller's id where one execution alone has it.
func find(ctx context.Context, st Store, name string) (guard.Key, error) {
	key, err := st.Guard().Expand(ctx, name)
	if err == nil || !errors.Is(err, guard.ErrUnknown) && !errors.Is(err, guard.ErrKeyForm) {
		return key, err
	}
	if id, ok := checkpointID(name); ok {
		switch key, err := ofCheckpoint(ctx, st, id); {
		case err == nil:
			return key, nil
		case !errors.Is(err, guard.ErrUnknown):
			return key, err
		}
		switch key, err := sought(ctx, st, guard.Filter{Checkpoint: id, NotMethod: undo.Method}); {
		case err == nil:
			return key, nil
		case !errors.Is(err, guard.ErrUnknown):
			return key, err
		}
	}
	key, err = sought(ctx, st, guard.Filter{ID: name})
	if errors.Is(err, guard.ErrUnknown) {
		err = refuse(http.StatusNotFound,
			"no such execution: neither a key that begins like this, nor a whole checkpoint or execution id, is %.80q", name)
	}
	return key, err
}

// checkpointID is the id of a checkpoint as it is recorded; false where it has not the form.
func checkpointID(text string) (string, bool) {
	id, err := uuid.Parse(text)
	return id.String(), err == nil && len(text) == len(id.String())
}

// ofCheckpoint is the key of the call of a checkpoint, as long as the vault has that and
// the key is still that call's; else guard.ErrUnknown.
func ofCheckpoint(ctx context.Context, st Store, id string) (guard.Key, error) {
	call, _, record, err := callOf(ctx, st, id)
	switch {
	case err != nil:
		return guard.Key{}, err
	case record == nil:
		return guard.Key{}, guard.ErrUnknown
	}
	return call.Execution, nil
}

// callOf is what the vault has of the call of a checkpoint, and the record of its execution:
// nil where the key is free, or another call's. Where the vault has nothing that can be read
// it is guard.ErrUnknown.
func callOf(ctx context.Context, st Store, id string) (*checkpoint.Snapshot, *checkpoint.Result, *guard.Record, error) {
	vault := st.Vault()
	if vault == nil {
		return nil, nil, nil, guard.ErrUnknown
	}
	call, result, err := vault.Peek(ctx, id)
	switch {
	case errors.Is(err, checkpoint.ErrStore):
		return nil, nil, nil, unavailable(err)
	case err != nil:
		return nil, nil, nil, guard.ErrUnknown
	}
	found, err := st.Guard().Look(ctx, call.Execution)
	switch {
	case errors.Is(err, guard.ErrUnknown):
	case err != nil:
		return nil, nil, nil, err
	case found.Record.Announced(id):
		return call, result, found.Record, nil
	}
	return call, result, nil, nil
}

// sought is the key of the one execution that passes a filter which no index serves. Where
// there are too many executions to say that there is no other one, that is an error.
func sought(ctx context.Context, st Store, f guard.Filter) (guard.Key, error) {
	var found []guard.Recorded
	after := ""
	for range maxSought {
		page, err := st.Guard().List(ctx, f, after, 2)
		if err != nil {
			return guard.Key{}, err
		}
		found = append(found, page.Executions...)
		if after = page.Next; after == "" || len(found) > 1 {
			break
		}
	}
	switch {
	case len(found) > 1:
		return guard.Key{}, refuse(http.StatusBadRequest, "several executions have this id, such as %s; give a key", describe(found))
	case after != "" && len(found) == 1:
		return guard.Key{}, refuse(http.StatusBadRequest,
			"there are too many executions to say that no older one has this id too; the youngest that has it is %s: give its key", describe(found))
	case after != "":
		return guard.Key{}, refuse(http.StatusBadRequest,
			"there are too many executions to look through here, and the youngest do not have it; executions?id= goes through all, page by page")
	case len(found) == 0:
		return guard.Key{}, guard.ErrUnknown
	}
	return found[0].Key, nil
}

// describe names executions so that one can be chosen.
func describe(all []guard.Recorded) string {
	var words []string
	for i := range all {
		record := all[i].Record
		words = append(words, fmt.Sprintf("%s (%s %s)", all[i].Key, record.Method, record.Path))
	}
	return strings.Join(words, " and ")
}
