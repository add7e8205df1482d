package client_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"time"

	"github.com/dpserve/dpserve/client"
)

// answer is what fakeNode sends for one method and path.
type answer struct {
	status int
	body   string
}

// fakeNode answers like a node's admin API. With a node: client.New("127.0.0.1:8265").
func fakeNode(answers map[string]answer) *httptest.Server {
	return httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		a, ok := answers[r.Method+" "+r.URL.RequestURI()]
		if !ok {
			a = answer{404, `{"apiVersion":"dpserve/v1","error":{"code":"not_found","message":"no path"}}`}
		}
		w.WriteHeader(a.status)
		_, _ = io.WriteString(w, a.body)
	}))
}

// Show what a file would change, then deploy it for the cluster that the plan was made for.
func ExampleClient_Deploy() {
	node := fakeNode(map[string]answer{
		"POST /api/v1/plan?file=app.yaml": {200, `{"apiVersion":"dpserve/v1","plan":{"revision":7,
			"changes":true,"fits":true,"apps":[{"app":"demo","effect":"create"}]}}`},
		"PUT /api/v1/apps?file=app.yaml&revision=7": {202, `{"apiVersion":"dpserve/v1","revision":8,
			"apps":{"demo":1},"changes":[{"app":"demo","effect":"create"}]}`},
		"GET /api/v1/apps/demo": {200, `{"apiVersion":"dpserve/v1","app":{"name":"demo",
			"status":"RUNNING","revision":1,"desired":4,"ready":4}}`},
	})
	defer node.Close()
	c, err := client.New(node.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	ctx := context.Background()
	file := client.DeployRequest{File: "app.yaml", Text: []byte("applications: […]")}
	plan, err := c.Plan(ctx, file)
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(plan.Apps[0].Effect, plan.Apps[0].App, "fits:", plan.Fits)
	file.Revision = &plan.Revision
	done, err := c.Deploy(ctx, file)
	if err != nil {
		fmt.Println(err)
		return
	}
	app, err := c.App(ctx, "demo")
	fmt.Println(done.Revision, app.Status, app.Ready, "of", app.Desired, err)
	// Output:
	// create demo fits: true
	// 8 RUNNING 4 of 4 <nil>
}

// An error carries a code for programs, a message and a hint for people, and the faults of a file.
func ExampleError() {
	node := fakeNode(map[string]answer{
		"POST /api/v1/validate?file=app.yaml": {400, `{"apiVersion":"dpserve/v1","error":{
			"code":"invalid_argument","message":"1 fault","faults":[{"file":"app.yaml","line":3,"col":5,
			"path":"applications[0].nmae","message":"unknown key","hint":"did you mean \"name\"?"}]}}`},
	})
	defer node.Close()
	c, err := client.New(node.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	_, err = c.Validate(context.Background(), "app.yaml", []byte("applications: [{nmae: demo}]"))
	var e *client.Error
	if errors.As(err, &e) {
		fmt.Println(e.Status, e.Code, e.Message)
		for _, f := range e.Faults {
			fmt.Printf("%s:%d:%d: %s, %s\n", f.File, f.Line, f.Col, f.Message, f.Hint)
		}
	}
	// Output:
	// 400 invalid_argument 1 fault
	// app.yaml:3:5: unknown key, did you mean "name"?
}

// Watch an application's state changes. After an interruption, continue from the last number.
func ExampleClient_Events() {
	node := fakeNode(map[string]answer{
		"GET /api/v1/events?app=demo&since=0": {200, `id: 1
data: {"apiVersion":"dpserve/v1","number":1,"kind":"deployed","app":"demo"}

: alive

data: {"apiVersion":"dpserve/v1","number":2,"kind":"unit","app":"demo","phase":"ready"}

`},
	})
	defer node.Close()
	c, err := client.New(node.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	for e, err := range c.Events(context.Background(), "demo", 0) {
		if err != nil {
			fmt.Println(client.CodeOf(err)) // the node has stopped
			break
		}
		fmt.Println(e.Number, e.Kind, e.App, cmp.Or(e.Phase, "-"))
	}
	// Output:
	// 1 deployed demo -
	// 2 unit demo ready
	// unavailable
}

// Empty a node before its machine is serviced.
func ExampleClient_Drain() {
	node := fakeNode(map[string]answer{
		"POST /api/v1/nodes/n2/drain?deadline=30s": {
			202,
			`{"apiVersion":"dpserve/v1","node":"n2","status":"DRAINING"}`,
		},
		"GET /api/v1/nodes": {200, `{"apiVersion":"dpserve/v1","nodes":[
			{"node":"n1","state":"alive","ranks":8},{"node":"n2","state":"drained"}]}`},
	})
	defer node.Close()
	c, err := client.New(node.URL)
	if err != nil {
		fmt.Println(err)
		return
	}
	defer c.Close()
	ctx, deadline := context.Background(), 30*time.Second
	fmt.Println(c.Drain(ctx, "n2", &deadline))
	nodes, err := c.Nodes(ctx)
	for _, n := range nodes {
		fmt.Println(n.Node, n.State, n.Ranks)
	}
	fmt.Println(err)
	// Output:
	// <nil>
	// n1 alive 8
	// n2 drained 0
	// <nil>
}

func ExampleParseLogLine() {
	l, err := client.ParseLogLine("2026-01-02T03:04:05Z demo/0/3 stderr out of memory")
	fmt.Println(l.App, l.Group, l.Rank, l.Stream, l.Text, err)
	// Output: demo 0 3 stderr out of memory <nil>
}
