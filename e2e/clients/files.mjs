// Programs over clients that say in header fields what a request does. Each step of a task is an
// operation that is meant. The SDK of AWS and tus-js-client try again by themselves; for the client of
// WebDAV the program does.
import { CopyObjectCommand, S3Client } from '@aws-sdk/client-s3';
import { AuthType, createClient } from 'webdav';
import { Upload } from 'tus-js-client';
import { backoff } from './agents.mjs';

// inTurn takes one step after the other, whatever came of the one before.
async function inTurn({ steps }, call, problem) {
	const log = [];
	for (const step of steps) {
		log.push(await call(step).then(() => 'succeeds', (err) => {
			const { status, slug } = problem(err);
			return ['throws', err.constructor.name, status, slug].filter((v) => v != null).join(' ');
		}));
	}
	return { id: log.join('; ') };
}

function webdav(task, operate) {
	const client = createClient(task.base + '/webdav', { authType: AuthType.Password, username: 'agent', password: task.key });
	return inTurn(task, async (step) => {
		for (let tried = 0; ; tried++) {
			try {
				return await operate(client, step);
			} catch (err) {
				if (tried >= task.retries) throw err;
				await new Promise((resolve) => setTimeout(resolve, backoff));
			}
		}
	}, (err) => ({ status: err.status, slug: err.response?.headers.get('execution-problem') }));
}

export const files = {
	async 's3'(task) {
		const s3 = new S3Client({
			endpoint: task.base + '/s3', region: 'eu-central-1', forcePathStyle: true, maxAttempts: task.retries + 1,
			credentials: { accessKeyId: 'agent', secretAccessKey: 'secret' },
		});
		// The signature differs with each attempt, so the gateway has a key of its own for each agent.
		s3.middlewareStack.add((next) => (args) => {
			args.request.headers['x-gateway-key'] = task.key;
			return next(args);
		}, { step: 'build' });
		return inTurn(task, (step) => s3.send(new CopyObjectCommand({ Bucket: 'bucket', Key: 'copy', CopySource: 'bucket/' + step })),
			(err) => ({ status: err.$metadata?.httpStatusCode, slug: err.$response?.headers['execution-problem'] }));
	},
	'webdav copy': (task) => webdav(task, (client, step) => client.copyFile('/source', '/' + step)),
	// The steps differ in Overwrite alone.
	'webdav move': (task) => webdav(task, (client, step) => client.moveFile('/source', '/moved', { overwrite: step === 'a' })),
	// A step is an upload in three parts with equal bytes.
	tus: (task) => inTurn(task, () => new Promise((onSuccess, onError) => {
		new Upload(Buffer.alloc(12, 'a'), {
			endpoint: task.base + '/tus', chunkSize: 4, retryDelays: Array(task.retries).fill(backoff),
			headers: { Authorization: 'Bearer ' + task.key }, onSuccess, onError,
		}).start();
	}), (err) => ({ status: err.originalResponse?.getStatus(), slug: err.originalResponse?.getHeader('Execution-Problem') })),
};
