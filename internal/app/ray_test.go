package app

import (
	"flag"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"
)

// updateRay writes the golden files of the Ray Serve files.
var updateRay = flag.Bool("update-ray", false, "write the golden files of testdata/ray")

// parseRay parses a file of testdata with the model files beside it.
func parseRay(t *testing.T, path string) (*File, []Warning, error) {
	t.Helper()
	text, err := os.ReadFile(path)
	require.NoError(t, err)
	return ParseWith(Default(), filepath.Base(path), text, Foreign{Beside: func(name string) ([]byte, error) {
		return os.ReadFile(filepath.Join(filepath.Dir(path), name))
	}})
}

// TestRayFilesBecomeApplications: the canonical form of every good file, and its notes.
func TestRayFilesBecomeApplications(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob("testdata/ray/*.yaml")
	require.NoError(t, err)
	require.Len(t, paths, 12)
	for _, path := range paths {
		file, warnings, err := parseRay(t, path)
		if filepath.Base(path) == "05_dp_openai_autoscaling.yaml" {
			require.ErrorContains(t, err, "the number of groups is fixed")
			continue
		}
		require.NoError(t, err, path)
		var b strings.Builder
		for _, w := range warnings {
			b.WriteString("# " + w.String() + "\n")
			assert.Positive(t, w.Line)
		}
		b.Write(file.Print())
		golden := strings.TrimSuffix(path, ".yaml") + ".golden"
		if *updateRay {
			require.NoError(t, os.WriteFile(golden, []byte(b.String()), 0o600))
		}
		want, err := os.ReadFile(golden)
		require.NoError(t, err)
		assert.Equal(t, string(want), b.String(), path)

		again, _, err := Parse(Default(), "again", file.Print())
		require.NoError(t, err, path)
		assert.Equal(t, file.Applications, again.Applications, path)
		assert.Equal(t, foreignRay, file.Foreign)
	}
}

// TestFaultyRayFilesAreRefusedWithPosition: each file is refused at the place of its fault.
func TestFaultyRayFilesAreRefusedWithPosition(t *testing.T) {
	t.Parallel()
	paths, err := filepath.Glob("testdata/ray_bad/*.yaml")
	require.NoError(t, err)
	require.Len(t, paths, 21)
	var b strings.Builder
	for _, path := range paths {
		_, _, err := parseRay(t, path)
		if err == nil {
			b.WriteString(filepath.Base(path) + ": no fault\n")
			continue
		}
		b.WriteString(err.Error() + "\n")
	}
	const golden = "testdata/ray_bad/faults.golden"
	if *updateRay {
		require.NoError(t, os.WriteFile(golden, []byte(b.String()), 0o600))
	}
	want, err := os.ReadFile(golden)
	require.NoError(t, err)
	assert.Equal(t, string(want), b.String())
	assert.Equal(t, 2, strings.Count(b.String(), "no fault"), "09 and 18 are fine here")
}

func TestFilesOfOtherToolsAreNamed(t *testing.T) {
	t.Parallel()
	for what, text := range map[string]string{
		"a Dynamo graph":        "apiVersion: nvidia.com/v1alpha1\nkind: DynamoGraphDeployment\nspec: {}",
		"a RayService":          "apiVersion: ray.io/v1\nkind: RayService\n",
		`(kind "Deployment")`:   "apiVersion: apps/v1\nkind: Deployment\n---\nkind: Service\n",
		"a Compose file":        "services:\n  vllm: {image: vllm/vllm-openai}\n",
		"a LiteLLM":             "model_list:\n- model_name: m\n",
		"an SGLang":             "model-path: m\ntensor-parallel-size: 2\n",
		"a vLLM configuration":  "model: m\ntensor-parallel-size: 2\n",
		"a Dynamo service conf": "Frontend: {}\nVllmWorker: {}\n",
	} {
		lines := faultsOf(t, text)
		require.Len(t, lines, 1, what)
		assert.Contains(t, lines[0], "this is ")
		assert.Contains(t, lines[0], what)
		assert.Contains(t, lines[0], "; hint: ")
	}
}

func TestABareModelConfigurationIsAnApplication(t *testing.T) {
	t.Parallel()
	file, _, err := parseRay(t, "testdata/ray/models/llama-3.1-8b.yaml")
	require.NoError(t, err)
	require.Len(t, file.Applications, 1)
	a := file.Applications[0]
	assert.Equal(t, "llama-3-1-8b", a.Name)
	assert.Equal(t, 2, a.NumReplicas)
	assert.Equal(t, map[string]string{"HF_TOKEN": "hf_xxx"}, a.Engine.Env)
}

// RG2: what num_replicas counts in a file of Ray Serve with data_parallel_size, as it is read and as
// --ray-num-replicas forces it. 0 is a key that is left out.
func TestNumReplicasOfARayFile(t *testing.T) {
	t.Parallel()
	const byGroups, ranks = RayGroups, RayRanks
	for _, row := range []struct {
		dpSize, replicas int
		counts           string
		want             string // ranks in groups; else a part of the fault
	}{
		{0, 0, "", "1 in 1"},
		{0, 3, "", "3 in 1"},
		{1, 1, "", "1 in 1"},
		{4, 0, "", "4 in 1"},
		{4, 4, "", "4 in 1"},
		{4, 8, "", "32 in 8"},
		{4, 6, "", "24 in 6"},
		{4, 3, "", "12 in 3"},
		{4, 4, byGroups, "16 in 4"},
		{4, 0, byGroups, "4 in 1"},
		{4, 0, ranks, "4 in 1"},
		{4, 4, ranks, "4 in 1"},
		{4, 8, ranks, "8 in 2"},
		{4, 6, ranks, "a multiple of dp_size"},
		{4, 3, ranks, "a multiple of dp_size"},
	} {
		text := "applications:\n- import_path: ray.serve.llm:build_dp_openai_app\n  args:\n" +
			"    llm_config: {model_loading_config: {model_id: m}, "
		if row.replicas > 0 {
			text += fmt.Sprintf("deployment_config: {num_replicas: %d}, ", row.replicas)
		}
		if row.dpSize > 0 {
			text += fmt.Sprintf("engine_kwargs: {data_parallel_size: %d}", row.dpSize)
		}
		file, warnings, err := ParseWith(Default(), "llm.yaml", []byte(text+"}\n"),
			Foreign{RayReplicas: row.counts})
		if err != nil {
			require.ErrorContains(t, err, row.want, row)
			continue
		}
		a := file.Applications[0]
		groups := a.NumReplicas / a.DataParallel.DPSize
		assert.Equal(t, row.want, fmt.Sprintf("%d in %d", a.NumReplicas, groups), row)
		isForced := row.counts == ranks && row.replicas > 0
		assert.Equal(t, row.dpSize > 1 && !isForced, len(warnings) > 0, "%v: %v", row, warnings)
	}
}
