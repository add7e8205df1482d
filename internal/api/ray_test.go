package api_test

import (
	"encoding/json"
	"fmt"
	"io"
	"net/http"
	"os"
	"path/filepath"
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

// oddApplication has an argument that its engine does not know.
const oddApplication = `{"name":"demo","model":{"id":"m"},"engine":{"kind":"vllm","args":{"tp":2}}}`

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

// rayBody is a body that was sent to Ray itself.
func rayBody(t *testing.T, name string) string {
	t.Helper()
	text, err := os.ReadFile(filepath.Join("testdata", "ray", name))
	require.NoError(t, err)
	return string(text)
}

// CC3: each body is one that Ray refuses, or takes and then fails to run: the answer is 400 with the place of
// the fault, and nothing is deployed or deleted.
func TestFaultyRayDocumentsChangeNothing(t *testing.T) {
	b := newBackend()
	s := serveRay(t, b)
	const path = "applications[0].import_path" // the Python behind it does not run here
	const size = "applications[0].deployments[0].num_replicas"
	cases := map[string]struct {
		ray  int // Ray's own status
		want string
	}{
		"bad_30_not_json":                    {500, "the body is not JSON"},
		"bad_31_yaml_body":                   {500, "the body is not JSON"},
		"bad_32_empty_object":                {400, "applications: wanted a list"},
		"bad_33_array":                       {400, "document: wanted a JSON object"},
		"bad_34_apps_wrong_type":             {400, "applications: wanted a list"},
		"bad_35_num_replicas_string":         {400, size + ": found four"},
		"bad_36_num_replicas_zero":           {400, size + ": found 0"},
		"bad_37_num_replicas_numeric_string": {400, size + ": found 4"},
		"bad_38_unknown_key_app":             {200, path},
		"bad_39_unknown_key_deployment":      {200, path},
		"bad_40_unknown_key_top":             {200, path},
		"bad_41_dup_app_names":               {400, `applications[1].name: "a" is that of another`},
		"bad_42_dup_route_prefix":            {400, `applications[1].route_prefix: "/a" is that of another`},
		"bad_43_dup_deployments":             {200, path},
		"bad_44_unknown_deployment":          {200, path},
		"bad_45_no_import_path":              {400, path + ": it is missing"},
		"bad_46_bad_import_path":             {400, path + ": found stream_app, wanted module:name"},
		"bad_47_bad_route_prefix":            {200, path},
		"bad_48_replicas_and_autoscaling":    {400, "exclude each other"},
		"bad_49_min_gt_max":                  {200, path},
		"bad_50_max_ongoing_negative":        {400, "deployments[0].max_ongoing_requests: found -1"},
		"bad_51_bad_proxy_location":          {400, "proxy_location: found Somewhere"},
		"bad_52_http_port_change":            {200, path},
		"bad_53_gang_not_multiple":           {400, size + ": 6 is no multiple of gang_size 4"},
		"bad_54_gang_with_pg_strategy":       {400, "deployments[0].placement_group_strategy: gangs take"},
		"bad_55_two_faults":                  {400, size + ": found 0"},
		"bad_56_working_dir_local":           {400, `runtime_env.working_dir: found "./here", wanted a URI`},
		"bad_57_app_host_port":               {400, "applications[0].host: it belongs at the top"},
	}
	files, err := filepath.Glob("testdata/ray/bad_*.request.body")
	require.NoError(t, err)
	require.Len(t, cases, len(files))
	for name, c := range cases {
		body := rayBody(t, name+".request.body")
		status, text := askRay(t, s, http.MethodPut, "/api/serve/applications/", body)
		assert.Equal(t, http.StatusBadRequest, status, "%s (Ray: %d)", name, c.ray)
		assert.Contains(t, text, c.want, name)
	}
	const python = `{"applications":[{"import_path":"m:app",`
	for body, want := range map[string]string{
		`{"applications":[1]}`:                      "applications[0]: wanted an object",
		python + `"name":7}]}`:                      "applications[0].name: wanted a string",
		python + `"deployments":{}}]}`:              "applications[0].deployments: wanted a list",
		`{"target_capacity":150,"applications":[]}`: "target_capacity: found 150",
		`{"applications":[` + ownApplication + `,{"name":"a","model":{"id":"m"},"engine":{}}]}`: "" +
			"applications[1].engine",
	} {
		status, text := askRay(t, s, http.MethodPut, "/api/serve/applications/", body)
		assert.Equal(t, http.StatusBadRequest, status, body)
		assert.Contains(t, text, want, body)
	}
	assert.Empty(t, b.deployed)
}

// kindsOf adds the JSON kind of each value to out, by its path; names that a document chooses are *, and so
// is each item of a list.
func kindsOf(out map[string]string, path string, value any) {
	switch v := value.(type) {
	case map[string]any:
		out[path] = "object"
		for key, item := range v {
			switch path {
			case ".proxies", ".applications", ".applications.*.deployments",
				".applications.*.deployed_app_config.args":
				key = "*"
			}
			kindsOf(out, path+"."+key, item)
		}
	case []any:
		out[path] = "list"
		for _, item := range v {
			kindsOf(out, path+".*", item)
		}
	case nil:
		if out[path] == "" {
			out[path] = "null"
		}
	default:
		out[path] = fmt.Sprintf("%T", v)
	}
}

// What is shown of an application has no key that Ray's own answer lacks, and each value is of the kind that
// Ray's is: Ray's clients refuse others.
func TestRayAnswersHaveTheShapeOfRay(t *testing.T) {
	b := newBackend()
	b.apps["demo"] = client.AppStatus{
		Name: "demo", Status: client.StatusRunning, Desired: 1,
		Units: []client.UnitStatus{{Unit: "demo/0", Ranks: []client.RankStatus{{Phase: "ready", PID: 7}}}},
	}
	s := serveRay(t, b)
	for path, file := range map[string]string{
		"/api/serve/applications/": "04_get_healthy.json", "/api/ray/version": "61_ray_version.json",
	} {
		var theirs, ours any
		require.NoError(t, json.Unmarshal([]byte(rayBody(t, file)), &theirs))
		status, text := askRay(t, s, http.MethodGet, path, "")
		require.Equal(t, http.StatusOK, status)
		require.NoError(t, json.Unmarshal([]byte(text), &ours))
		want, got := map[string]string{}, map[string]string{}
		kindsOf(want, "", theirs)
		kindsOf(got, "", ours)
		for path, kind := range got {
			switch {
			case strings.Contains(path, "deployed_app_config.args"), path == ".dpserve_version":
			case kind == "null" || want[path] == "null":
				assert.Contains(t, want, path)
			default:
				assert.Equal(t, want[path], kind, path)
			}
		}
		assert.NotEmpty(t, got)
	}
}

// CC3: a PUT to Ray's path deletes the applications that it does not list, and what is shown deploys again.
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
	_, text = askRay(t, s, http.MethodGet, "/api/serve/applications", "")
	assert.Contains(t, text, "with its last slash")
	for path, want := range map[string]int{
		"/api/serve/applications/":                               405,
		"/api/v1/applications/demo/deployments/demo/scale":       412,
		"/api/v1/applications/demo/deployments/other/scale":      404,
		"/api/v1/applications/elsewhere/deployments/other/scale": 404,
	} {
		status, _ = askRay(t, s, http.MethodPost, path, `{"target_num_replicas":2}`)
		assert.Equal(t, want, status, path)
	}
}

// A document for Ray Serve LLM is deployed, and its keys without effect are those of its application.
func TestRayDeploysAnApplicationOfRay(t *testing.T) {
	b := newBackend()
	s := serveRay(t, b)
	status, text := askRay(t, s, http.MethodPut, "/api/serve/applications/", `{"proxy_location":"HeadOnly",
		"applications":[`+ownApplication+`,{"name":"chat","route_prefix":"/chat","rout_prefix":"/x",
		"import_path":"ray.serve.llm:build_openai_app","args":{"llm_configs":[
			{"model_loading_config":{"model_id":"q","model_source":"org/q"}}]}}]}`)
	require.Equal(t, http.StatusOK, status, text)
	require.Len(t, b.deployed, 1)
	f, _, err := app.Parse(app.Default(), "app.yaml", b.deployed[0].Text)
	require.NoError(t, err)
	require.Len(t, f.Applications, 2)
	assert.Equal(t, []string{"demo", "chat", "/chat", "org/q"}, []string{
		f.Applications[0].Name, f.Applications[1].Name, f.Applications[1].RoutePrefix,
		f.Applications[1].Model.Source,
	})
}

// Keys without effect stand in the message of their application until it has another revision; an empty list
// deletes all applications.
func TestRayShowsKeysWithoutEffect(t *testing.T) {
	b := newBackend()
	s := serveRay(t, b)
	message := func() string {
		_, text := askRay(t, s, http.MethodGet, "/api/serve/applications/", "")
		var shown struct {
			Applications map[string]struct{ Message string }
		}
		require.NoError(t, json.Unmarshal([]byte(text), &shown))
		return shown.Applications["demo"].Message
	}
	put := func(body string) {
		status, text := askRay(t, s, http.MethodPut, "/api/serve/applications/", body)
		require.Equal(t, http.StatusOK, status, text)
	}
	put(`{"applications":[` + oddApplication + `]}`)
	assert.Contains(t, message(), "applications[0].")
	b.apps["demo"] = client.AppStatus{Name: "demo", Status: client.StatusRunning, Revision: 4}
	assert.Empty(t, message())
	put(rayBody(t, "70_put_empty_apps.request.body"))
	assert.Equal(t, []string{"demo"}, b.deleted)
}
