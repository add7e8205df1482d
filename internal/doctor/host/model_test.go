package host

import (
	"encoding/binary"
	"os"
	"path/filepath"
	"testing"

	"github.com/stretchr/testify/assert"
	"github.com/stretchr/testify/require"

	"github.com/dpserve/dpserve/internal/app"
	"github.com/dpserve/dpserve/internal/doctor"
	"github.com/dpserve/dpserve/internal/engine"
	"github.com/dpserve/dpserve/test/parallel"
)

// vllmApp returns an application that loads a model.
func vllmApp(source string, args ...app.Arg) *app.Application {
	a := &app.Application{Name: "chat"}
	a.Engine.Kind, a.Engine.Args, a.Model.Source = app.KindVLLM, args, source
	return a
}

// write writes a file and the folders above it.
func write(t *testing.T, text string, path ...string) string {
	t.Helper()
	file := filepath.Join(path...)
	require.NoError(t, os.MkdirAll(filepath.Dir(file), 0o755))
	require.NoError(t, parallel.WriteProgram(file, []byte(text)))
	return file
}

// tensors returns a file of safetensors with one tensor of some bytes.
func tensors(header string, size int) string {
	return string(binary.LittleEndian.AppendUint64(nil, uint64(len(header)))) + header +
		string(make([]byte, size))
}

// oneTensor is the header of a file with one tensor of 16 bytes.
const oneTensor = `{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[4],"data_offsets":[0,16]}}`

// twoFiles is an index of two files.
const twoFiles = `{"metadata":{"total_size":32},"weight_map":{"a":"m-1.safetensors","b":"m-2.safetensors",` +
	`"c":"m-1.safetensors"}}`

// wholeModel writes a complete model of two files.
func wholeModel(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	write(t, `{"model_type":"qwen2"}`, dir, "config.json")
	write(t, `{}`, dir, "tokenizer.json")
	write(t, twoFiles, dir, "model.safetensors.index.json")
	write(t, tensors(oneTensor, 16), dir, "m-1.safetensors")
	write(t, tensors(oneTensor, 16), dir, "m-2.safetensors")
	return dir
}

func TestAWholeModel(t *testing.T) {
	dir := wholeModel(t)
	m := findModel(vllmApp(dir), nil)
	assert.Equal(t, doctor.Model{
		App: "chat", Source: dir, Folder: dir, Files: 2, Bytes: uint64(2 * (8 + len(oneTensor) + 16)),
	}, m)
}

// TestDamagedModels breaks one thing of a complete model at a time.
func TestDamagedModels(t *testing.T) {
	for name, c := range map[string]struct {
		breakIt func(t *testing.T, dir string)
		check   func(t *testing.T, m *doctor.Model)
	}{
		"no config": {
			func(t *testing.T, dir string) {
				require.NoError(t, os.Remove(filepath.Join(dir, "config.json")))
			},
			func(t *testing.T, m *doctor.Model) {
				assert.Contains(t, m.Error, "config.json: no such file or directory")
			},
		},
		"a config that is no JSON": {
			func(t *testing.T, dir string) { write(t, "<html>", dir, "config.json") },
			func(t *testing.T, m *doctor.Model) {
				assert.Contains(t, m.Error, "config.json is no JSON object")
			},
		},
		"a missing file": {
			func(t *testing.T, dir string) {
				require.NoError(t, os.Remove(filepath.Join(dir, "m-2.safetensors")))
			},
			func(t *testing.T, m *doctor.Model) {
				assert.Equal(t, []string{"m-2.safetensors"}, m.Missing)
				assert.Equal(t, 1, m.Files)
			},
		},
		"a link to a file that is gone": {
			func(t *testing.T, dir string) {
				path := filepath.Join(dir, "m-2.safetensors")
				require.NoError(t, os.Remove(path))
				require.NoError(t, os.Symlink(filepath.Join(dir, "blobs", "x"), path))
			},
			func(t *testing.T, m *doctor.Model) { assert.Equal(t, []string{"m-2.safetensors"}, m.Missing) },
		},
		"a cut file": {
			func(t *testing.T, dir string) { write(t, tensors(oneTensor, 15), dir, "m-1.safetensors") },
			func(t *testing.T, m *doctor.Model) {
				assert.Equal(t, []string{"m-1.safetensors is cut: it has 109 of 110 bytes"}, m.Damaged)
			},
		},
		"a file that is cut in its header": {
			func(t *testing.T, dir string) { write(t, tensors(oneTensor, 0)[:40], dir, "m-1.safetensors") },
			func(t *testing.T, m *doctor.Model) {
				want := []string{"m-1.safetensors is no file of safetensors, or it is cut"}
				assert.Equal(t, want, m.Damaged)
			},
		},
		"an empty file": {
			func(t *testing.T, dir string) { write(t, "", dir, "m-1.safetensors") },
			func(t *testing.T, m *doctor.Model) {
				assert.Equal(t, []string{"m-1.safetensors is empty"}, m.Damaged)
			},
		},
		"a pointer of Git LFS": {
			func(t *testing.T, dir string) {
				write(t, "version https://git-lfs.github.com/spec/v1\noid sha256:1\n", dir, "m-1.safetensors")
			},
			func(t *testing.T, m *doctor.Model) {
				require.Len(t, m.Damaged, 1)
				assert.Contains(t, m.Damaged[0], "is a pointer of Git LFS: run `git lfs pull` there")
			},
		},
		"a header that makes no sense": {
			func(t *testing.T, dir string) {
				write(t, tensors(`{"w":{"data_offsets":[16,0]}}`, 16), dir, "m-1.safetensors")
			},
			func(t *testing.T, m *doctor.Model) {
				require.Len(t, m.Damaged, 1)
				assert.Contains(t, m.Damaged[0], errOffsets.Error())
			},
		},
		"an index that leaves the folder": {
			func(t *testing.T, dir string) {
				write(t, `{"weight_map":{"a":"../../etc/passwd"}}`, dir, "model.safetensors.index.json")
			},
			func(t *testing.T, m *doctor.Model) { assert.Contains(t, m.Error, "which is not in the folder") },
		},
		"an index that is no index": {
			func(t *testing.T, dir string) {
				write(t, `{"weight_map":[]}`, dir, "model.safetensors.index.json")
			},
			func(t *testing.T, m *doctor.Model) {
				assert.Contains(t, m.Error, "model.safetensors.index.json: ")
			},
		},
		"no tokenizer": {
			func(t *testing.T, dir string) {
				require.NoError(t, os.Remove(filepath.Join(dir, "tokenizer.json")))
			},
			func(t *testing.T, m *doctor.Model) { assert.True(t, m.NoTokenizer) },
		},
		"no weights": {
			func(t *testing.T, dir string) {
				for _, name := range []string{
					"m-1.safetensors", "m-2.safetensors", "model.safetensors.index.json",
				} {
					require.NoError(t, os.Remove(filepath.Join(dir, name)))
				}
			},
			func(t *testing.T, m *doctor.Model) { assert.Zero(t, m.Files) },
		},
		"other weights": {
			func(t *testing.T, dir string) {
				for _, name := range []string{
					"m-1.safetensors", "m-2.safetensors", "model.safetensors.index.json",
				} {
					require.NoError(t, os.Remove(filepath.Join(dir, name)))
				}
				write(t, "PK\x03\x04weights", dir, "pytorch_model.bin")
			},
			func(t *testing.T, m *doctor.Model) {
				assert.Equal(t, 1, m.Files)
				assert.Empty(t, m.Damaged)
			},
		},
	} {
		t.Run(name, func(t *testing.T) {
			dir := wholeModel(t)
			c.breakIt(t, dir)
			m := findModel(vllmApp(dir), nil)
			c.check(t, &m)
		})
	}
}

// TestWhereModelsAre: paths, one file, names of a hub with and without a copy in the cache.
func TestWhereModelsAre(t *testing.T) {
	home := t.TempDir()
	hub := filepath.Join(home, ".cache", "huggingface", "hub", "models--Qwen--Q")
	write(t, "abc\n", hub, "refs", "main")
	write(t, `{}`, hub, "snapshots", "abc", "config.json")
	write(t, `{}`, hub, "snapshots", "v2", "config.json")
	env := environment{"HOME=" + home, "HF_HUB_OFFLINE=1"}

	m := findModel(vllmApp("Qwen/Q"), env)
	assert.Equal(t, filepath.Join(hub, "snapshots", "abc"), m.Folder)
	m = findModel(vllmApp("Qwen/Q", app.Arg{Name: "revision", Value: "v2"}), env)
	assert.Equal(t, filepath.Join(hub, "snapshots", "v2"), m.Folder)
	m = findModel(vllmApp("Qwen/Other"), env)
	assert.Equal(t, doctor.Model{
		App: "chat", Source: "Qwen/Other", Remote: true, Offline: "HF_HUB_OFFLINE=1",
	}, m)
	own := vllmApp("Qwen/Other")
	own.Engine.Env = map[string]string{"HF_HUB_OFFLINE": "0", "HF_HOME": home}
	write(t, `{}`, home, "hub", "models--Qwen--Other", "snapshots", "main", "config.json")
	m = findModel(own, env)
	assert.Empty(t, m.Offline, "the environment of the file counts")
	assert.Equal(t, filepath.Join(home, "hub", "models--Qwen--Other", "snapshots", "main"), m.Folder)

	for source, want := range map[string]string{
		"/nowhere/q": "no such file or directory", "./q": "no such file or directory",
		"a/b/c": "no such file or directory", "~/q": "home folder",
	} {
		m = findModel(vllmApp(source), env)
		assert.Contains(t, m.Error, want, source)
		assert.False(t, m.Remote, source)
	}
	m = findModel(vllmApp("s3://bucket/some/q"), env)
	assert.Empty(t, m.Error)
	assert.Empty(t, m.Folder)

	one := write(t, "GGUFxxxxxxxx", home, "q.gguf")
	m = findModel(vllmApp(one), env)
	assert.Equal(t, 1, m.Files)
	dummy := vllmApp(filepath.Join(hub, "snapshots", "v2"), app.Arg{Name: "load_format", Value: "dummy"})
	m = findModel(dummy, env)
	assert.True(t, m.Dummy)
	assert.Empty(t, m.Error)
	assert.Empty(t, models([]*app.Application{{}}, env), "the simulated engine loads nothing")
}

// TestPrograms: by path, in PATH, missing, not executable; and versions by the metadata of packages.
func TestPrograms(t *testing.T) {
	dir := t.TempDir()
	venv := filepath.Join(dir, "venv")
	program := write(t, "#!"+filepath.Join(venv, "bin", "python")+"\n", venv, "bin", "vllm")
	find := func(a *app.Application, env environment) doctor.Engine {
		return findEngine(t.Context(), a, engine.Command(a), env)
	}
	write(t, "", venv, "lib", "python3.12", "site-packages", "vllm-0.32.0+cpu.dist-info", "METADATA")
	env := environment{"PATH=/nowhere" + string(os.PathListSeparator) + filepath.Join(venv, "bin")}
	assert.Equal(t, doctor.Engine{
		App: "chat", Kind: "vllm", Program: "vllm", Path: program, Version: "0.32.0+cpu",
	}, find(vllmApp("q"), env))

	missing := vllmApp("q")
	missing.Engine.Env = map[string]string{"PATH": "/nowhere"}
	assert.Equal(t, "vllm is not in PATH", find(missing, env).Error, "the PATH of the file counts")
	missing.Engine.Command = []string{"/nowhere/vllm", "serve"}
	assert.Equal(t, "/nowhere/vllm: no such file or directory", find(missing, env).Error)
	missing.Engine.Command = []string{venv, "serve"}
	assert.Equal(t, venv+" is a folder", find(missing, env).Error)
	plainFile := write(t, "", dir, "data")
	require.NoError(t, os.Chmod(plainFile, 0o600))
	missing.Engine.Command = []string{plainFile}
	assert.Equal(t, plainFile+" may not be executed", find(missing, env).Error)

	// a script elsewhere whose interpreter is in the virtual environment, and python itself
	other := vllmApp("q")
	other.Engine.Command = []string{
		write(t, "#!"+filepath.Join(venv, "bin", "python")+" -I\nimport vllm\n", dir, "tools", "run"),
	}
	assert.Equal(t, "0.32.0+cpu", find(other, env).Version)
	sglang := &app.Application{Name: "s"}
	sglang.Engine.Kind = app.KindSGLang
	write(t, "", venv, "bin", "python3")
	assert.Equal(t, "no package sglang is installed next to it", find(sglang, env).Unknown)
	write(t, "", venv, "lib", "python3.12", "site-packages", "sglang-0.5.6.dist-info", "METADATA")
	assert.Equal(t, "0.5.6", find(sglang, env).Version)

	own := &app.Application{Name: "own"}
	own.Engine.Kind = app.KindSim
	assert.Nil(t, engine.Command(own), "the simulated engine is this program")
	own.Engine.Command = []string{plainFile}
	assert.Len(t, engines(t.Context(), []*app.Application{own}, env), 1)
	own.Engine.Kind = app.KindAttach
	assert.Empty(t, engines(t.Context(), []*app.Application{own}, env))
}

// FuzzTensorsEnd: no header makes it panic, and no result is out of bounds.
func FuzzTensorsEnd(f *testing.F) {
	for _, seed := range []string{
		oneTensor, `{}`, `{"w":{"data_offsets":[-1,9223372036854775807]}}`, `[]`, ``,
	} {
		f.Add([]byte(seed))
	}
	f.Fuzz(func(t *testing.T, header []byte) {
		end, err := tensorsEnd(header)
		if end < 0 || end > maxTensors {
			t.Fatal(end, err)
		}
	})
}
