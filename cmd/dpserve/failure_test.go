package main

import (
	"context"
	"encoding/json"
	"fmt"
	"net/http"
	"net/url"
	"os"
	"strings"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/client"
	"github.com/dpserve/dpserve/internal/problem"
	"github.com/dpserve/dpserve/test/harness"
)

const faulty = "applications:\n  - nam: demo\n    model: {id: demo}\n    engine: {kind: vlm}\n"

// lastError decodes the error of a command with -o json: the last line on stderr.
func lastError(t *testing.T, c *cli) errorFacts {
	t.Helper()
	lines := strings.Split(strings.TrimSpace(c.stderr()), "\n")
	var doc errorDocument
	require.NoError(t, json.Unmarshal([]byte(lines[len(lines)-1]), &doc), c.stderr())
	assert.Equal(t, client.APIVersion, doc.APIVersion)
	return doc.Error
}

func TestErrorsAsJSON(t *testing.T) {
	for _, command := range []string{"plan", "deploy"} {
		c := newCLI(t)
		path := file(t, faulty)
		require.Equal(t, 2, c.run([]string{command, path, "-o", "json"}))
		e := lastError(t, c)
		assert.Equal(t, client.CodeInvalidArgument, e.Code)
		assert.Equal(t, "the application file has 3 faults", e.Message)
		assert.Equal(t, 2, e.ExitCode)
		require.Len(t, e.Faults, 3)
		assert.Equal(t, path, e.Faults[0].File)
		assert.Equal(t, 2, e.Faults[0].Line)
		for _, f := range e.Faults {
			assert.NotEmpty(t, f.Message)
		}
		assert.Empty(t, c.stdout())
	}

	c := newCLI(t)
	c.cluster.down = refused()
	require.Equal(t, 1, c.run([]string{"status", "-o", "json"}))
	assert.Equal(t, errorFacts{client.Error{
		Code: client.CodeUnavailable, Message: "no answer from 127.0.0.1:8265", Hint: "is dpserve running?",
	}, 1}, lastError(t, c))

	c = newCLI(t)
	c.cluster.nodes.plan = client.Plan{
		Apps: []client.AppPlan{{Units: []client.UnitPlan{{Why: "no room"}}}},
	}
	require.Equal(t, 5, c.run([]string{"plan", file(t, tiny), "-o=json"}))
	assert.True(t, json.Valid([]byte(c.stdout())), "the plan is on stdout")
	e := lastError(t, c)
	assert.Equal(t, client.CodeUnplaceable, e.Code)
	assert.Equal(t, []string{"no room"}, e.Details)
	assert.Equal(t, 5, e.ExitCode)
}

// A command line that is refused before -o is read is answered as -o asks, too.
func TestUsageErrorsAsJSON(t *testing.T) {
	for _, line := range []string{
		"plan --nope -o json", "plan -ojson", "status --output=json --nope", "nodes -o json extra",
	} {
		c := newCLI(t)
		require.Equal(t, 2, c.run(strings.Fields(line)), line)
		assert.Equal(t, 2, lastError(t, c).ExitCode, line)
	}
	for _, line := range []string{
		"plan --nope -o yaml", "plan --nope -- -o json", "drain --nope -o json", "status -o xml",
	} {
		c := newCLI(t)
		require.Equal(t, 2, c.run(strings.Fields(line)), line)
		assert.True(t, strings.HasPrefix(c.stderr(), "dpserve: "), line)
	}
}

func TestCodesOfErrors(t *testing.T) {
	assert.Equal(t, codeInterrupted, describeError(fmt.Errorf("wait: %w", errInterrupted)).Code)
	late := fmt.Errorf("ask: %w", context.DeadlineExceeded)
	assert.Equal(t, string(problem.Timeout), describeError(late).Code)
	assert.Equal(t, string(problem.Internal), describeError(os.ErrClosed).Code)
}

func TestValidateJSON(t *testing.T) {
	c := newCLI(t)
	path := file(t, faulty)
	require.Equal(t, 2, c.run([]string{"validate", path, "-o", "json"}))
	doc := decode[validateDocument](t, c.stdout())
	assert.Empty(t, c.stderr(), "the faults are said once")
	assert.False(t, doc.Valid)
	assert.Empty(t, doc.Applications)
	require.Len(t, doc.Faults, 3)
	f := doc.Faults[0]
	assert.Equal(t, path, f.File)
	assert.Equal(t, []int{2, 5}, []int{f.Line, f.Col})
	assert.Equal(t, `unknown key "nam"`, f.Message)
	assert.Contains(t, f.Hint, `did you mean "name"`)

	c = newCLI(t)
	vllm := "applications: [{name: real, model: {id: real}, engine: {kind: vllm}}]"
	require.Zero(t, c.run([]string{"validate", file(t, vllm), "-o", "json"}), c.stderr())
	doc = decode[validateDocument](t, c.stdout())
	assert.True(t, doc.Valid)
	assert.Equal(t, []validatedApp{{"real", "vllm"}}, doc.Applications)
	assert.Equal(t, []client.Fault{}, doc.Faults)

	c = newCLI(t)
	require.Zero(t, c.run([]string{"validate", file(t, tiny), "-o", "yaml"}), c.stderr())
	assert.Contains(t, c.stdout(), "valid: true\n")
	c = newCLI(t)
	require.Zero(t, c.run([]string{"validate", file(t, tiny), "-o", "name"}), c.stderr())
	assert.Equal(t, "demo\n", c.stdout())

	c = newCLI(t)
	require.Equal(t, 2, c.run([]string{"validate", "/nowhere/app.yaml", "-o", "json"}))
	assert.Contains(t, lastError(t, c).Message, "cannot read /nowhere/app.yaml")
}

// CC1: seven faults of five kinds (a key that is unknown or missing, a value of another type or out of range,
// a name that is taken) are all named at once with place, path and hint: the same by validate, deploy and the
// node.
func TestFaultsAreTheSameEverywhere(t *testing.T) {
	const text = `applications:
  - nam: demo
    model: {id: demo}
    engine: {kind: vlm, args: {max_num_seqs: 8}}
    data_parallel: {dp_size: 0}
  - name: other
    model: {id: demo}
    engine: {kind: sim, startup_timeout_s: soon}
    max_ongoing_requests: -4
`
	path := file(t, text)
	c := newCLI(t)
	require.Equal(t, 2, c.run([]string{"validate", path, "-o", "json"}))
	faults := decode[validateDocument](t, c.stdout()).Faults
	require.Len(t, faults, 7)
	for _, f := range faults {
		assert.Positive(t, f.Line)
		assert.NotEmpty(t, f.Path)
		assert.NotEmpty(t, f.Hint+f.Wanted)
	}
	validate, deploy := newCLI(t), newCLI(t)
	require.Equal(t, 2, validate.run([]string{"validate", path}))
	require.Equal(t, 2, deploy.run([]string{"deploy", path}))
	assert.Contains(t, validate.stderr(), "dpserve: 7 faults\n")
	assert.Contains(t, validate.stderr(), `did you mean "name"?`)
	assert.Equal(t, validate.stderr(), deploy.stderr())
	synctest.Test(t, func(t *testing.T) {
		code, answer := harness.New(t).Do(http.MethodPut, "/api/v1/apps?file="+url.QueryEscape(path), text)
		assert.Equal(t, http.StatusBadRequest, code)
		var refused struct {
			Error struct{ Faults []client.Fault }
		}
		require.NoError(t, json.Unmarshal([]byte(answer), &refused), answer)
		assert.Equal(t, faults, completeFaults(refused.Error.Faults))
	})
}

// The flag comes before the variable, and that before the default.
func TestAddressOfTheCluster(t *testing.T) {
	c := newCLI(t)
	require.Zero(t, c.run([]string{"status"}))
	c.getenv = func(name string) string { return map[string]string{"DPSERVE_ADDR": "gpu-1"}[name] }
	require.Zero(t, c.run([]string{"status"}))
	require.Zero(t, c.run([]string{"status", "--addr", ":18265"}))
	require.Zero(t, c.run([]string{"--addr", "gpu-2", "nodes"}))
	require.Zero(t, c.run([]string{"validate", file(t, tiny), "--addr", "gpu-2"}))
	assert.Equal(t, []string{defaultAddr, "gpu-1", ":18265", "gpu-2"}, c.asked)
	for _, command := range [][]string{{"up"}, {"start"}, {"join", "h", "--token", "x"}} {
		assert.Equal(t, 2, c.run(append(command, "--addr", ":1")), command)
	}
}

func TestAddressThatIsNone(t *testing.T) {
	c := newCLI(t)
	c.newAdmin = newAdmin
	require.Equal(t, 2, c.run([]string{"status", "--addr", "8265"}))
	assert.Equal(t, "dpserve: \"8265\" is not the address of a dpserve: it is a number; a port alone is "+
		"written :8265\nhint: an address is HOST, HOST:PORT, :PORT or http://HOST:PORT; the port of HOST is "+
		"8265\n", c.stderr())
}

func TestTokenPrintsItsZone(t *testing.T) {
	c := newCLI(t)
	require.Zero(t, c.run([]string{"token"}))
	assert.Contains(t, c.stderr(), time.Unix(0, 0).Local().Format("until 2006-01-02 15:04:05 MST"))
}

func TestJoinTakesTheDefaultPort(t *testing.T) {
	for given, want := range map[string]string{
		"10.0.0.1": "10.0.0.1:7947", "10.0.0.1:1": "10.0.0.1:1", "fd00::1": "[fd00::1]:7947",
		"[fd00::1]": "[fd00::1]:7947", "[fd00::1]:2": "[fd00::1]:2", "gpu-1": "gpu-1:7947", "a:b:c": "a:b:c",
	} {
		assert.Equal(t, want, withNodePort(given))
	}
}

func TestAdvertiseMustBeOfThisMachine(t *testing.T) {
	require.NoError(t, checkAdvertise(""))
	require.NoError(t, checkAdvertise("127.0.0.1"))
	err := checkAdvertise("203.0.113.77") // documentation only: nobody has it
	require.ErrorContains(t, err, "--advertise 203.0.113.77 is not an address of this machine")
	assert.Contains(t, describeError(err).Hint, "write one that other nodes reach: ")
	err = checkAdvertise("no..name")
	require.ErrorContains(t, err, "--advertise no..name: this name does not resolve here")
	assert.Contains(t, describeError(err).Hint, "write an IP of this machine: ")
}
