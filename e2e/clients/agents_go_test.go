package clients

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/a2aproject/a2a-go/a2a"
	"github.com/a2aproject/a2a-go/a2aclient"
	"github.com/a2aproject/a2a-go/a2asrv"
	"github.com/a2aproject/a2a-go/a2asrv/eventqueue"
	mcpgo "github.com/mark3labs/mcp-go/client"
	"github.com/mark3labs/mcp-go/client/transport"
	mcpgotypes "github.com/mark3labs/mcp-go/mcp"
	mcpgoserver "github.com/mark3labs/mcp-go/server"
	"github.com/modelcontextprotocol/go-sdk/jsonrpc"
	"github.com/modelcontextprotocol/go-sdk/mcp"
)

// ran counts the effects of all servers of this process.
var ran atomic.Int64

func effect() string { return fmt.Sprint("effect-", ran.Add(1)) }

type payment struct {
	Amount int `json:"amount"`
}

// goSDKServer is an MCP server of the official Go SDK.
func goSDKServer() http.Handler {
	text := func(s string) *mcp.CallToolResult {
		return &mcp.CallToolResult{Content: []mcp.Content{&mcp.TextContent{Text: s}}}
	}
	server := mcp.NewServer(&mcp.Implementation{Name: "go-sdk", Version: "1"}, nil)
	mcp.AddTool(server, &mcp.Tool{Name: "peek", Annotations: &mcp.ToolAnnotations{ReadOnlyHint: true}}, func(_ context.Context, _ *mcp.CallToolRequest, in payment) (*mcp.CallToolResult, any, error) {
		return text(fmt.Sprint("peek ", in.Amount)), nil, nil
	})
	mcp.AddTool(server, &mcp.Tool{Name: "pay"}, func(context.Context, *mcp.CallToolRequest, payment) (*mcp.CallToolResult, any, error) {
		return text(effect()), nil, nil
	})
	mcp.AddTool(server, &mcp.Tool{Name: "slow"}, func(ctx context.Context, r *mcp.CallToolRequest, in payment) (*mcp.CallToolResult, any, error) {
		for n := 1; n <= 2 && r.Params.GetProgressToken() != nil; n++ {
			if err := r.Session.NotifyProgress(ctx, &mcp.ProgressNotificationParams{ProgressToken: r.Params.GetProgressToken(), Progress: float64(n), Total: 2}); err != nil {
				return nil, nil, err
			}
		}
		return text(fmt.Sprint("slow ", in.Amount)), nil, nil
	})
	server.AddResource(&mcp.Resource{Name: "note", URI: "note://1"}, func(_ context.Context, r *mcp.ReadResourceRequest) (*mcp.ReadResourceResult, error) {
		return &mcp.ReadResourceResult{Contents: []*mcp.ResourceContents{{URI: r.Params.URI, Text: "a note"}}}, nil
	})
	return mcp.NewStreamableHTTPHandler(func(*http.Request) *mcp.Server { return server }, nil)
}

// mcpGoServer is an MCP server of mark3labs/mcp-go.
func mcpGoServer() http.Handler {
	server := mcpgoserver.NewMCPServer("mcp-go", "1", mcpgoserver.WithResourceCapabilities(false, false))
	amount := mcpgotypes.WithNumber("amount")
	server.AddTool(mcpgotypes.NewTool("peek", amount, mcpgotypes.WithReadOnlyHintAnnotation(true)), func(_ context.Context, r mcpgotypes.CallToolRequest) (*mcpgotypes.CallToolResult, error) {
		return mcpgotypes.NewToolResultText(fmt.Sprint("peek ", r.GetInt("amount", 0))), nil
	})
	server.AddTool(mcpgotypes.NewTool("pay", amount), func(context.Context, mcpgotypes.CallToolRequest) (*mcpgotypes.CallToolResult, error) {
		return mcpgotypes.NewToolResultText(effect()), nil
	})
	server.AddTool(mcpgotypes.NewTool("slow", amount), func(ctx context.Context, r mcpgotypes.CallToolRequest) (*mcpgotypes.CallToolResult, error) {
		for n := 1; n <= 2 && r.Params.Meta != nil && r.Params.Meta.ProgressToken != nil; n++ {
			if err := server.SendNotificationToClient(ctx, "notifications/progress", map[string]any{"progressToken": r.Params.Meta.ProgressToken, "progress": n, "total": 2}); err != nil {
				return nil, err
			}
		}
		return mcpgotypes.NewToolResultText(fmt.Sprint("slow ", r.GetInt("amount", 0))), nil
	})
	server.AddResource(mcpgotypes.NewResource("note://1", "note"), func(context.Context, mcpgotypes.ReadResourceRequest) ([]mcpgotypes.ResourceContents, error) {
		return []mcpgotypes.ResourceContents{mcpgotypes.TextResourceContents{URI: "note://1", Text: "a note"}}, nil
	})
	return mcpgoserver.NewStreamableHTTPServer(server)
}

// agent is one of a2a-go.
type agent struct{}

// Execute pays.
func (agent) Execute(ctx context.Context, r *a2asrv.RequestContext, queue eventqueue.Queue) error {
	return queue.Write(ctx, a2a.NewMessage(a2a.MessageRoleAgent, a2a.TextPart{Text: effect()}))
}

// Cancel cancels nothing.
func (agent) Cancel(context.Context, *a2asrv.RequestContext, eventqueue.Queue) error {
	return a2a.ErrTaskNotCancelable
}

func a2aGoServer() http.Handler { return a2asrv.NewJSONRPCHandler(a2asrv.NewHandler(agent{})) }

// withKey sends a credential with each request.
type withKey string

// RoundTrip sends a request.
func (k withKey) RoundTrip(r *http.Request) (*http.Response, error) {
	r = r.Clone(r.Context())
	r.Header.Set("Authorization", "Bearer "+string(k))
	return http.DefaultTransport.RoundTrip(r)
}

// often makes a call as often as it is meant, each time until it succeeds.
func often(a task, call func(context.Context) (string, error)) (id string, err error) {
	for range a.Times {
		for tried := 0; ; tried++ {
			id, err = within(a, call)
			if err == nil || tried >= a.Retries {
				break
			}
			<-time.After(time.Second) // as programs do before they call again
		}
		if err != nil {
			return "", err
		}
	}
	return id, nil
}

func within(a task, call func(context.Context) (string, error)) (string, error) {
	ctx := context.Background()
	if a.Timeout > 0 {
		var cancel context.CancelFunc
		ctx, cancel = context.WithTimeout(ctx, time.Duration(a.Timeout)*time.Millisecond)
		defer cancel()
	}
	return call(ctx)
}

// outcome tells what the program sees.
func outcome(id string, err error) sight {
	var known *jsonrpc.Error
	switch {
	case err == nil:
		return sight{OK: true, ID: id, Seen: "succeeds"}
	case errors.As(err, &known):
		var data struct {
			Error struct {
				Code string `json:"code"`
			} `json:"error"`
		}
		_ = json.Unmarshal(known.Data, &data) // without one there is no more to tell
		return sight{Seen: strings.TrimSpace(fmt.Sprintf("returns *jsonrpc.Error %d %s", known.Code, data.Error.Code))}
	case errors.Is(err, errTool):
		return sight{Seen: "gets a tool result that is an error"}
	case errors.Is(err, a2a.ErrInternalError):
		return sight{Seen: "returns a2a.ErrInternalError"}
	case errors.Is(err, context.DeadlineExceeded):
		return sight{Seen: "returns context.DeadlineExceeded"}
	}
	for _, problem := range []string{"may have been executed"} {
		if strings.Contains(err.Error(), problem) {
			return sight{Seen: "returns an error with the gateway's sentence"}
		}
	}
	return sight{Seen: "returns an error"}
}

var errTool = errors.New("the tool failed")

// goSDK is a session of the official Go SDK. It is opened anew where an error has closed it.
type goSDK struct {
	a        task
	session  *mcp.ClientSession
	progress chan string
}

func (c *goSDK) open(ctx context.Context) error {
	if c.session != nil {
		if err := c.session.Ping(ctx, nil); err == nil {
			return nil
		}
		_ = c.session.Close()
	}
	client := mcp.NewClient(&mcp.Implementation{Name: "program", Version: "1"}, &mcp.ClientOptions{
		ProgressNotificationHandler: func(_ context.Context, r *mcp.ProgressNotificationClientRequest) {
			c.progress <- fmt.Sprintf("%v/%v", r.Params.Progress, r.Params.Total)
		},
	})
	var err error
	c.session, err = client.Connect(ctx, &mcp.StreamableClientTransport{Endpoint: c.a.Base + "/mcp", HTTPClient: &http.Client{Transport: withKey(c.a.Key)}}, nil)
	return err
}

func (c *goSDK) tool(ctx context.Context, name string, args any, meta mcp.Meta) (string, error) {
	result, err := c.session.CallTool(ctx, &mcp.CallToolParams{Name: name, Arguments: args, Meta: meta})
	if err != nil {
		return "", err
	}
	text := ""
	for _, part := range result.Content {
		if t, ok := part.(*mcp.TextContent); ok {
			text += t.Text
		}
	}
	if result.IsError {
		return text, errTool
	}
	return text, nil
}

func callGoSDK(_ *testing.T, a task) sight {
	c := &goSDK{a: a}
	defer func() {
		if c.session != nil {
			_ = c.session.Close()
		}
	}()
	if err := c.open(context.Background()); err != nil {
		return sight{Seen: "cannot connect: " + err.Error()}
	}
	first := true
	return outcome(often(a, func(ctx context.Context) (string, error) {
		if !first {
			if err := c.open(context.Background()); err != nil {
				return "", err
			}
		}
		first = false
		return c.tool(ctx, "pay", payment{a.Amount}, nil)
	}))
}

// tourGoSDK does what programs do with a server, and tells what came of it.
func tourGoSDK(t *testing.T, a task) sight {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	c := &goSDK{a: a, progress: make(chan string, 100)}
	if err := c.open(ctx); err != nil {
		return sight{Seen: err.Error()}
	}
	defer func() { _ = c.session.Close() }()
	init := c.session.InitializeResult()
	log := []string{init.ServerInfo.Name}
	if err := c.session.Ping(ctx, nil); err != nil {
		return sight{Seen: err.Error()}
	}
	list, err := c.session.ListTools(ctx, nil)
	if err != nil {
		return sight{Seen: err.Error()}
	}
	var names []string
	for _, tool := range list.Tools {
		names = append(names, tool.Name)
	}
	slices.Sort(names)
	log = append(log, strings.Join(names, " "))
	if init.Capabilities.Resources != nil {
		found, err := c.session.ListResources(ctx, nil)
		if err != nil {
			return sight{Seen: err.Error()}
		}
		read, err := c.session.ReadResource(ctx, &mcp.ReadResourceParams{URI: found.Resources[0].URI})
		if err != nil {
			return sight{Seen: err.Error()}
		}
		log = append(log, fmt.Sprintf("%d resources, %d contents", len(found.Resources), len(read.Contents)))
	}
	for n, call := range a.Calls {
		said, err := c.tool(ctx, call.Name, call.Args, mcp.Meta{"progressToken": fmt.Sprint("token ", n)})
		line := fmt.Sprintf("%s: %s %v", call.Name, said, err)
		for range call.Progress {
			select {
			case p := <-c.progress:
				line += " " + p
			case <-ctx.Done():
				line += " no progress"
			}
		}
		log = append(log, line)
	}
	_, err = c.tool(ctx, "nothing", map[string]any{}, nil)
	log = append(log, "nothing: "+outcome("", err).Seen)
	return sight{OK: true, ID: strings.Join(log, "\n")}
}

// mcpGo is a session of mark3labs/mcp-go.
func mcpGo(ctx context.Context, a task) (*mcpgo.Client, *mcpgotypes.InitializeResult, error) {
	client, err := mcpgo.NewStreamableHttpClient(a.Base+"/mcp", transport.WithHTTPBasicClient(&http.Client{Transport: withKey(a.Key)}))
	if err != nil {
		return nil, nil, err
	}
	if err := client.Start(ctx); err != nil {
		return nil, nil, err
	}
	var hello mcpgotypes.InitializeRequest
	hello.Params.ProtocolVersion = "2025-11-25" // the servers here know it
	hello.Params.ClientInfo = mcpgotypes.Implementation{Name: "program", Version: "1"}
	init, err := client.Initialize(ctx, hello)
	return client, init, err
}

func toolMCPGo(ctx context.Context, client *mcpgo.Client, name string, args any, meta *mcpgotypes.Meta) (string, error) {
	var r mcpgotypes.CallToolRequest
	r.Params.Name, r.Params.Arguments, r.Params.Meta = name, args, meta
	result, err := client.CallTool(ctx, r)
	if err != nil {
		return "", err
	}
	text := ""
	for _, part := range result.Content {
		if t, ok := part.(mcpgotypes.TextContent); ok {
			text += t.Text
		}
	}
	if result.IsError {
		return text, errTool
	}
	return text, nil
}

func callMCPGo(t *testing.T, a task) sight {
	client, _, err := mcpGo(t.Context(), a)
	if err != nil {
		return sight{Seen: "cannot connect: " + err.Error()}
	}
	defer func() { _ = client.Close() }()
	return outcome(often(a, func(ctx context.Context) (string, error) {
		return toolMCPGo(ctx, client, "pay", payment{a.Amount}, nil)
	}))
}

// tourMCPGo does what programs do with a server, and tells what came of it.
func tourMCPGo(t *testing.T, a task) sight {
	ctx, cancel := context.WithTimeout(t.Context(), patience)
	defer cancel()
	client, init, err := mcpGo(ctx, a)
	if err != nil {
		return sight{Seen: err.Error()}
	}
	defer func() { _ = client.Close() }()
	progress := make(chan string, 100)
	client.OnNotification(func(n mcpgotypes.JSONRPCNotification) {
		if n.Method == "notifications/progress" {
			progress <- fmt.Sprintf("%v/%v", n.Params.AdditionalFields["progress"], n.Params.AdditionalFields["total"])
		}
	})
	log := []string{init.ServerInfo.Name}
	list, err := client.ListTools(ctx, mcpgotypes.ListToolsRequest{})
	if err != nil {
		return sight{Seen: err.Error()}
	}
	var names []string
	for _, tool := range list.Tools {
		names = append(names, tool.Name)
	}
	slices.Sort(names)
	log = append(log, strings.Join(names, " "))
	for n, call := range a.Calls {
		said, err := toolMCPGo(ctx, client, call.Name, call.Args, &mcpgotypes.Meta{ProgressToken: fmt.Sprint("token ", n)})
		line := fmt.Sprintf("%s: %s %v", call.Name, said, err)
		for range call.Progress {
			select {
			case p := <-progress:
				line += " " + p
			case <-ctx.Done():
				line += " no progress"
			}
		}
		log = append(log, line)
	}
	_, err = toolMCPGo(ctx, client, "nothing", map[string]any{}, nil)
	log = append(log, "nothing: "+outcome("", err).Seen)
	return sight{OK: true, ID: strings.Join(log, "\n")}
}

func callA2AGo(t *testing.T, a task) sight {
	client, err := a2aclient.NewFromEndpoints(t.Context(), []a2a.AgentInterface{{URL: a.Base + "/a2a", Transport: a2a.TransportProtocolJSONRPC}},
		a2aclient.WithJSONRPCTransport(&http.Client{Transport: withKey(a.Key)}))
	if err != nil {
		return sight{Seen: err.Error()}
	}
	var message *a2a.Message
	return outcome(often(a, func(ctx context.Context) (string, error) {
		if message == nil {
			message = a2a.NewMessage(a2a.MessageRoleUser, a2a.TextPart{Text: fmt.Sprint("pay ", a.Amount)})
		}
		answer, err := client.SendMessage(ctx, &a2a.MessageSendParams{Message: message})
		if err != nil {
			return "", err
		}
		message = nil // the next one is another
		if said, ok := answer.(*a2a.Message); ok && len(said.Parts) == 1 {
			return said.Parts[0].(a2a.TextPart).Text, nil
		}
		return fmt.Sprintf("%T", answer), nil
	}))
}

// doubtGoSDK tells what an error of a call that is in doubt says, and what the session is good for
// afterwards.
func doubtGoSDK(t *testing.T, a task) sight {
	c := &goSDK{a: a}
	if err := c.open(t.Context()); err != nil {
		return sight{Seen: err.Error()}
	}
	defer func() { _ = c.session.Close() }()
	_, err := c.tool(t.Context(), "pay", payment{a.Amount}, nil)
	said, after := c.tool(t.Context(), "peek", payment{a.Amount}, nil)
	return sight{ID: fmt.Sprintf("%v\n%s", err, said), Seen: fmt.Sprint(after)}
}

func doubtMCPGo(t *testing.T, a task) sight {
	client, _, err := mcpGo(t.Context(), a)
	if err != nil {
		return sight{Seen: err.Error()}
	}
	defer func() { _ = client.Close() }()
	_, err = toolMCPGo(t.Context(), client, "pay", payment{a.Amount}, nil)
	said, after := toolMCPGo(t.Context(), client, "peek", payment{a.Amount}, nil)
	return sight{ID: fmt.Sprintf("%v\n%s", err, said), Seen: fmt.Sprint(after)}
}

// slowGoSDK calls a tool in a session of its own.
func slowGoSDK(t *testing.T, a task, tool string) (string, error) {
	c := &goSDK{a: a}
	if err := c.open(t.Context()); err != nil {
		return "", err
	}
	defer func() { _ = c.session.Close() }()
	return c.tool(t.Context(), tool, payment{a.Amount}, nil)
}

func slowMCPGo(t *testing.T, a task, tool string) (string, error) {
	client, _, err := mcpGo(t.Context(), a)
	if err != nil {
		return "", err
	}
	defer func() { _ = client.Close() }()
	return toolMCPGo(t.Context(), client, tool, payment{a.Amount}, nil)
}

// tourA2AGo streams a message, twice with one id, and asks for a task that is not there.
func tourA2AGo(t *testing.T, a task) sight {
	client, err := a2aclient.NewFromEndpoints(t.Context(), []a2a.AgentInterface{{URL: a.Base + "/a2a", Transport: a2a.TransportProtocolJSONRPC}},
		a2aclient.WithJSONRPCTransport(&http.Client{Transport: withKey(a.Key)}))
	if err != nil {
		return sight{Seen: err.Error()}
	}
	var log []string
	message := a2a.NewMessage(a2a.MessageRoleUser, a2a.TextPart{Text: fmt.Sprint("pay ", a.Amount)})
	for range 2 {
		for event, err := range client.SendStreamingMessage(t.Context(), &a2a.MessageSendParams{Message: message}) {
			said, ok := event.(*a2a.Message)
			if err != nil || !ok || len(said.Parts) != 1 {
				return sight{Seen: fmt.Sprint(event, err)}
			}
			log = append(log, "message: "+said.Parts[0].(a2a.TextPart).Text)
		}
	}
	_, err = client.GetTask(t.Context(), &a2a.TaskQueryParams{ID: "nothing"})
	return sight{OK: true, ID: strings.Join(append(log, fmt.Sprint(errors.Is(err, a2a.ErrTaskNotFound))), "\n")}
}
