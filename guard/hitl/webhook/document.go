package webhook

import (
	"crypto/hmac"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"strings"
	"time"

	"github.com/agent-guard/caddy-agent-guard/guard/hitl"
)

// typeOpened is the one type of message there is so far.
const typeOpened = "escalation.opened"

// message is the body; the package's comment describes it.
type message struct {
	Type      string    `json:"type"`
	Timestamp time.Time `json:"timestamp"`
	Data      data      `json:"data"`
}

type data struct {
	ID        string `json:"id"`
	Gateway   string `json:"gateway,omitempty"`
	Level     uint8  `json:"level"`
	LevelName string `json:"level_name"`
	Cause     string `json:"cause"`
	Summary   string `json:"summary"`
	Workflow  string `json:"workflow,omitempty"`
	Caller    string `json:"caller,omitempty"`
	Links     links  `json:"links"`
}

type links struct {
	Checkpoint string `json:"checkpoint,omitempty"`
	Rollback   string `json:"rollback,omitempty"`
	Error      string `json:"error,omitempty"`
	Execution  string `json:"execution,omitempty"`
	Upstream   string `json:"upstream,omitempty"`
}

func body(e *hitl.Escalation, gateway string) ([]byte, error) {
	return json.Marshal(message{
		Type:      typeOpened,
		Timestamp: e.Opened,
		Data: data{
			ID: e.ID, Gateway: gateway, Level: uint8(e.Level), LevelName: e.Level.String(),
			Cause: string(e.Cause), Summary: e.Summary, Workflow: e.Workflow, Caller: e.Caller, Links: links(e.Links),
		},
	})
}

// sign is the value of webhook-signature: one signature for each key.
func sign(keys [][]byte, id, timestamp string, body []byte) string {
	all := make([]string, len(keys))
	for i, key := range keys {
		mac := hmac.New(sha256.New, key)
		mac.Write([]byte(id + "." + timestamp + "."))
		mac.Write(body)
		all[i] = "v1," + base64.StdEncoding.EncodeToString(mac.Sum(nil))
	}
	return strings.Join(all, " ")
}
