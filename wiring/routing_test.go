package wiring

import (
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/app"
)

// TestRoutingRulesAreQuotedAtValidate: what a policy refuses is a fault of the file, in the policy's own words.
func TestRoutingRulesAreQuotedAtValidate(t *testing.T) {
	const at = "app.yaml:1:"
	for routing, want := range map[string][]string{
		"{policy: scoring, params: {profile: prefix-aware}}": {"profile 'prefix-aware' was removed; use 'locality'"},
		"{policy: scoring, params: {profile: fastest}}":      {"balanced", "locality", "load"},
		"{policy: round-robin, params: {profile: locality}}": {"profile 'locality' has no effect with round-robin; use policy: scoring or drop the profile"},
		"{policy: scorin}": {`routing.policy: found "scorin", wanted power-of-two | `, "scoring", `did you mean "scoring"?`},
		"{policy: scoring, params: {profil: locality}}":               {"params.profil: unknown parameter", `did you mean "profile"?`},
		"{policy: random, params: {profile: locality}}":               {"params.profile: unknown parameter"},
		"{policy: kv, params: {router_temperature: hot, varient: 1}}": {"params.router_temperature: found hot", "params.varient: unknown parameter", `did you mean "variant"?`},
		"{policy: scoring, preset: tund}":                             {`routing.preset: found "tund", wanted documented | tuned`, `did you mean "tuned"?`},
		"{policy: mex}":                                               {`policy "mex" is not supported in this version`},
		"{identity: learned}":                                         {`identity "learned" is not supported in this version`},
		"{identity: txt}":                                             {`routing.identity: found "txt", wanted text | tokens`},
		"{busy_threshold: 95}":                                        {"routing.busy_threshold: found 95, wanted a share from 0 to 1"},
	} {
		_, _, err := ParseApps("app.yaml", []byte("applications: [{name: a, model: {id: a}, engine: {kind: sim}, routing: "+routing+"}]"))
		require.Error(t, err, routing)
		var faults app.Faults
		require.ErrorAs(t, err, &faults, routing)
		assert.Len(t, faults, 1, routing)
		for _, text := range append(want, at, "applications[0].routing") {
			assert.Contains(t, err.Error(), text, routing)
		}
	}
	for _, routing := range []string{
		"{policy: round-robin, params: {profile: balanced}}", "{policy: scoring, params: {profile: locality}}", "{policy: kv, preset: tuned}", "{busy_threshold: 0.95, identity: tokens}",
	} {
		_, _, err := ParseApps("app.yaml", []byte("applications: [{name: a, model: {id: a}, engine: {kind: sim}, routing: "+routing+"}]"))
		require.NoError(t, err, routing)
	}
}
