package wiring

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/routing"
)

// The schema accepts every policy of the router, or says that this version does not support it yet.
func TestSchemaKnowsEveryPolicy(t *testing.T) {
	for _, name := range routing.Names() {
		_, _, err := ParseApps("app.yaml",
			[]byte("applications: [{name: a, model: {id: a}, engine: {kind: sim}, "+
				"routing: {policy: "+name+"}}]"))
		if err != nil {
			assert.ErrorContains(t, err, "not supported in this version", name)
		}
	}
}

func TestPolicyChecksItsParameters(t *testing.T) {
	_, _, err := ParseApps("app.yaml", []byte(`applications:
  - name: a
    model: {id: a}
    engine: {kind: sim}
    routing:
      policy: power-of-two
      params: {prefer_lokal: true}
`))
	require.Error(t, err)
	assert.Contains(t, err.Error(), "app.yaml:7:15: applications[0].routing.params: ")
	assert.Contains(t, err.Error(), "params.prefer_lokal: unknown parameter")
	assert.Contains(t, err.Error(), `did you mean "prefer_local"`)
}
