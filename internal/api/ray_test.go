package api_test

import (
	"encoding/json"
	"io"
	"net/http"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/api"
	"github.com/dpserve/dpserve/internal/app"
)

// ownApplication is an application of dpserve in Ray's form.
const ownApplication = `{"name":"demo","route_prefix":"/","import_path":"dpserve:app",` +
	`"args":{"model":{"id":"m"},"engine":{"kind":"sim"}}}`

// askRay sends a request to a server of b and returns the status and the body.
func askRay(t *testing.T, s *api.Server, method, path, body string) (int, string) {
	t.Helper()
	r, err := http.NewRequestWithContext(t.Context(), method, "http://"+s.Addr().String()+path,
		strings.NewReader(body))
	require.NoError(t, err)
	r.Close = true
	res, err := http.DefaultClient.Do(r)
	require.NoError(t, err)
	defer func() { _ = res.Body.Close() }()
	text, err := io.ReadAll(res.Body)
	require.NoError(t, err)
	return res.StatusCode, string(text)
}

func serveRay(t *testing.T, b *backend) *api.Server {
	t.Helper()
	specs := func() []*app.Application {
		f, _, err := app.Parse(app.Default(), "app.yaml",
			[]byte("applications: [{name: demo, model: {id: m}, engine: {kind: sim}}]"))
		require.NoError(t, err)
		return f.Applications
	}
	s, _ := serve(t, api.Config{Backend: b, Ray: &api.Ray{Specs: specs}})
	return s
}

// Each body is faulty by Ray's rules, or names Python that dpserve cannot run: the answer is 400 with the
// place of the fault, and nothing is deployed or deleted.
func TestFaultyRayDocumentsChangeNothing(t *testing.T) {
	b := newBackend()
	s := serveRay(t, b)
	one := func(fields string) string {
		return `{"applications":[{"name":"a","import_path":"m:app"` + fields + `}]}`
	}
	deployment := func(fields string) string { return one(`,"deployments":[{"name":"D",` + fields + `}]`) }
	for _, c := range []struct{ body, want string }{
		{
			`{"applications": [ {"name": `,
			"not JSON",
		},
		{
			"applications:\n- name: a\n",
			"not JSON",
		},
		{
			`{}`,
			"applications: wanted a list",
		},
		{
			`[]`,
			"wanted a JSON object",
		},
		{
			`{"applications":{"name":"a"}}`,
			"applications: wanted a list",
		},
		{
			`{"applications":[{"name":"a"}]}`,
			"applications.0.import_path: it is missing",
		},
		{
			`{"applications":[1]}`,
			"applications.0: wanted an object",
		},
		{
			one(""),
			"runs no Python",
		},
		{
			one(`,"host":"0.0.0.0"`),
			"applications.0.host: it belongs at the top",
		},
		{
			one(`,"deployments":{}`),
			"applications.0.deployments: wanted a list",
		},
		{
			one(`,"name":7`),
			"applications.0.name: wanted a string",
		},
		{
			deployment(`"num_replicas":"four"`),
			"applications.0.deployments.0.num_replicas: found four",
		},
		{
			deployment(`"num_replicas":0`),
			"deployments.0.num_replicas: found 0",
		},
		{
			deployment(`"num_replicas":"4"`),
			"deployments.0.num_replicas: found 4",
		},
		{
			deployment(`"num_replicas":2,"autoscaling_config":{"min_replicas":1}`),
			"exclude each other",
		},
		{
			deployment(`"max_ongoing_requests":-1`),
			"max_ongoing_requests: found -1",
		},
		{
			deployment(`"num_replicas":6,"gang_scheduling_config":{"gang_size":4}`),
			"6 is no multiple of gang_size 4",
		},
		{
			deployment(`"placement_group_strategy":"PACK","gang_scheduling_config":{"gang_size":4}`),
			"gangs take",
		},
		{
			one(`,"runtime_env":{"working_dir":"./here"}`),
			"wanted a URI",
		},
		{
			`{"applications":[{"name":"a","import_path":"app"}]}`,
			"wanted module:name",
		},
		{
			`{"proxy_location":"Somewhere","applications":[]}`,
			"proxy_location: found Somewhere",
		},
		{
			`{"target_capacity":150,"applications":[]}`,
			"target_capacity: found 150",
		},
		{
			`{"applications":[` + ownApplication + `,` + ownApplication + `]}`,
			`applications.1.name: "demo" is`,
		},
		{
			`{"applications":[{"name":"a","model":{"id":"m"},"engine":{"kind":"sym"}}]}`,
			"engine.kind",
		},
	} {
		status, text := askRay(t, s, http.MethodPut, "/api/serve/applications/", c.body)
		assert.Equal(t, http.StatusBadRequest, status, c.body)
		assert.Contains(t, text, c.want, c.body)
	}
	assert.Empty(t, b.deployed)
}

func TestRayDeploysAndShows(t *testing.T) {
	b := newBackend()
	s := serveRay(t, b)
	status, text := askRay(t, s, http.MethodPut, "/api/serve/applications/",
		`{"proxy_location":"HeadOnly","applications":[`+ownApplication+`]}`)
	assert.Equal(t, http.StatusOK, status)
	assert.Empty(t, text)
	require.Len(t, b.deployed, 1)
	assert.True(t, b.deployed[0].Prune, "applications that are not listed are deleted")

	b.apps["demo"] = client.AppStatus{
		Name: "demo", Status: client.StatusRunning, Desired: 1,
		Units: []client.UnitStatus{{Unit: "demo/0", Ranks: []client.RankStatus{{Phase: "ready", PID: 7}}}},
	}
	status, text = askRay(t, s, http.MethodGet, "/api/serve/applications/", "")
	require.Equal(t, http.StatusOK, status)
	var shown struct {
		Applications map[string]struct {
			Config json.RawMessage `json:"deployed_app_config"`
		} `json:"applications"`
	}
	require.NoError(t, json.Unmarshal([]byte(text), &shown))
	assert.Contains(t, string(shown.Applications["demo"].Config), `"import_path":"dpserve:app"`)
	status, _ = askRay(t, s, http.MethodPut, "/api/serve/applications/",
		`{"applications":[`+string(shown.Applications["demo"].Config)+`]}`)
	assert.Equal(t, http.StatusOK, status, "what is shown deploys again")
	assert.Equal(t, string(b.deployed[0].Text), string(b.deployed[1].Text))

	for path, want := range map[string]int{
		"/api/serve/applications": 404, "/api/serve/applications/?api_type=foo": 400,
		"/api/serve/applications/?api_type=imperative": 200, "/api/ray/version": 200, "/api/version": 200,
	} {
		status, _ = askRay(t, s, http.MethodGet, path, "")
		assert.Equal(t, want, status, path)
	}
	status, _ = askRay(t, s, http.MethodPost, "/api/serve/applications/", "{}")
	assert.Equal(t, http.StatusMethodNotAllowed, status)
}
